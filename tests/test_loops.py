"""The loop detector against two corpora: texts that run in circles, and texts that only look a little like it."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import itertools
import json
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.quality import loops
from shardmill.quality.loops import find_loop

STDLIB = Path(sysconfig.get_path("stdlib"))
LICENSES = Path("/usr/share/common-licenses")

ESSAY = """\
The mill stood where the river bent, and had stood there since before the road. My grandfather used to say that a \
wheel has no opinion: it turns for wheat as for rye, in good years and bad ones. I did not understand him then. What \
I remember is the sound, a low wooden knocking under the floor, and the dust that lay on every sill by evening, so \
fine that a moth left tracks in it.

Trade came by boat until 1911. The sacks were lowered from the upper door by a chain hoist whose brake he had repaired \
with a piece of harness leather; it held for thirty years. When the railway took the grain, he kept two clients: a \
baker who swore that slow stones make sweet flour, and a widow with a goat. He ground for them on Tuesdays.

People ask why he went on. I think that he liked being needed by something that could not thank him. The river rose \
each March and had to be let through; the gates stuck; the eels came up in the dark and had to be lifted, cold and \
furious, out of the trash rack. None of this paid. All of it was due at a certain hour, and he was there.

After his death the council put up a sign with three dates, one of them wrong. The wheel was replaced by a copy in \
steel, which turns when a coin is dropped. Children love it. I went once, and stood with my hand on the railing, \
waiting for the knock beneath the boards. It never came; the bearings are too good.
"""

THOUGHT = """\
Okay, the user wants the smallest n such that n! ends in 100 zeros. The number of trailing zeros is the sum of \
floor(n/5^k). For n = 400 that gives 80 + 16 + 3 = 99. For 405 it is 81 + 16 + 3 = 100. So the answer should be 405.

Wait, let me double-check whether something between 400 and 405 would do. 401 to 404 have no factor 5, so they stay at \
99. Good. And 405 = 5 * 81 adds exactly one. Hmm, is it possible that they want the count of n with exactly 100 zeros? \
No, "smallest" is what they said. Also, 99 to 100 isn't a jump over, unlike at 125 where it goes from 28 to 31.

Let me also verify 125: 25 + 5 + 1 = 31, and 124: 24 + 4 = 28. Right. So the answer is 405, and I should explain it \
briefly with Legendre's formula.
"""

CHINESE = """\
河水在村口拐了一个弯，磨坊就立在那里，比大路还要老。祖父常说，水轮没有主见，好年景坏年景，麦子黑麦，它都一样地转。那时我听不懂他的话。\
我只记得脚下低沉的木头声，还有每到傍晚落满窗台的粉尘，细得连飞蛾走过都会留下脚印。一九一一年以前，粮食都从水路来。后来铁路把生意带走了，\
只剩下两个主顾：一个相信慢磨出甜面的面包师，和一个养着山羊的寡妇。每逢星期二，祖父就为他们开磨。有人问他为什么还要坚持。\
我想，他喜欢被一件不会道谢的东西需要着。每年三月河水上涨，闸门总是卡住，鳗鱼在黑暗里逆流而上，要用手一条条捞出来。这些事都不赚钱，\
可是每一件都有它的时辰，而他总是在那里。他去世以后，镇上立了一块牌子，写着三个年份，其中一个还是错的。木轮换成了钢做的复制品，投一枚硬币才转。\
孩子们很喜欢。我去过一次，手扶着栏杆，等着地板下面的那一声响。它再也没有来过，因为轴承太好了。
"""

SONG = """\
{verse1}
{chorus}
{verse2}
{chorus}
Bridge:
And the water doesn't ask us where we're going
And the wheel has never wondered why it turns
{chorus}
{chorus}
Na na na na, na na na, turn around, turn around
Na na na na, na na na, turn around, turn around
Na na na na, na na na, turn around, turn around
Na na na na, na na na, turn around, turn around
""".format(
    chorus="Turn, turn, mill by the river\nTurn till the morning comes\nTurn, turn, I'll love you forever\n"
    "Turn till the grinding's done\n",
    verse1="There was flour on her shoulders and the sky was made of tin\nI had walked since early harvest with no hat",
    verse2="Now the stones are cold as winter and the baker's gone to town\nStill I hear the hoist chain rattle",
)


def _rng(seed: int = 7) -> random.Random:
    return random.Random(seed)


def pi_digits(count: int) -> str:
    """Gibbons' spigot."""
    digits: list[str] = []
    q, r, t, i = 1, 180, 60, 2
    while len(digits) < count:
        u, y = 3 * (3 * i + 1) * (3 * i + 2), (q * (27 * i - 12) + 5 * r) // (5 * t)
        digits.append(str(y))
        q, r, t, i = 10 * q * i * (2 * i - 1), 10 * u * (q * (5 * i - 2) + r - y * t), t * u, i + 1
    return digits[0] + "." + "".join(digits[1:])


def markdown_table(rows: int) -> str:
    rng = _rng()
    head = "| City | Population | Area (km²) | Coastal | Founded |\n|------|-----:|-----:|:----:|-----:|\n"
    return head + "".join(
        f"| {rng.choice(['North', 'East', 'Old', 'New'])}{rng.choice(['ford', 'ham', 'mouth', 'bury'])} "
        f"| {rng.randrange(10**4, 10**6):,} | {rng.randrange(50, 900)} | {rng.choice(['yes', 'no'])} "
        f"| {rng.randrange(700, 1900)} |\n"
        for _ in range(rows)
    )


def csv_table(rows: int) -> str:
    rng, buffer = _rng(), io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(["name", "city", "status", "plan"])
    for _ in range(rows):
        writer.writerow([rng.choice(["Ann", "Bo", "Cy"]), rng.choice(["Rome", "Oslo"]), "active", rng.choice("AB")])
    return buffer.getvalue()


def word_table(rows: int, separator: str) -> str:
    """Cells from small vocabularies, as a test-data generator writes them."""
    rng = _rng()
    columns = ["Ann Bo Cy Di Ed".split(), "Rome Oslo Bern Kyiv".split(), ["active", "paused"], ["free", "basic", "pro"]]
    return "\n".join(separator.join(rng.choice(column) for column in columns) for _ in range(rows))


def training_plan(days: int) -> str:
    rng = _rng()
    lines = [
        "Rest or walk",
        "Run {} miles easy",
        "Bike {} minutes, then stretch",
        "Hill repeats, {} times",
        "Swim {} laps",
    ]
    return "\n".join(f"- **Day {i}:** {rng.choice(lines).format(rng.randrange(2, 40))}" for i in range(1, days + 1))


def yaml_services(count: int) -> str:
    return "services:\n" + "".join(
        f"  web-{i}:\n    image: nginx:latest\n    restart: always\n    ports:\n      - {8000 + i}:80\n"
        for i in range(count)
    )


def log_lines(count: int) -> str:
    rng, lines, seconds = _rng(), [], 0.0
    for i in range(count):
        seconds += rng.expovariate(0.4)
        what = rng.choice(
            ["GET /index.html 200", "heartbeat from node 7", "POST /v1/items 201", "cache miss for key user"]
        )
        lines.append(
            f"2026-11-30 08:{int(seconds) // 60 % 60:02}:{seconds % 60:06.3f} INFO worker-{i % 4}: {what} in 12 ms"
        )
    return "\n".join(lines)


def heartbeat_log(count: int) -> str:
    """The dullest of logs: one message, one second apart."""
    return "\n".join(
        f"[2026-11-30 {i // 3600:02}:{i // 60 % 60:02}:{i % 60:02}] INFO agent: heartbeat ok" for i in range(count)
    )


def times_table(size: int) -> str:
    return "\n".join(f"{a} x {b} = {a * b}" for a in range(1, size + 1) for b in range(1, size + 1))


def times_grid(size: int) -> str:
    return "\n".join(" ".join(f"{a * b:4}" for b in range(1, size + 1)) for a in range(1, size + 1))


def truth_table(variables: int) -> str:
    names = [f"p{i}" for i in range(variables)]
    rows = itertools.product([True, False], repeat=variables)
    return (
        "| "
        + " | ".join([*names, "all"])
        + " |\n"
        + "\n".join("| " + " | ".join("T" if v else "F" for v in [*row, all(row)]) + " |" for row in rows)
    )


def twelve_days() -> str:
    gifts = (
        "a partridge in a pear tree|two turtle doves|three french hens|four calling birds|five golden rings|six geese \
a-laying|seven swans a-swimming|eight maids a-milking|nine ladies dancing|ten lords a-leaping|eleven pipers piping|\
twelve drummers drumming".split("|")
    )
    days = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
    return "\n\n".join(
        f"On the {day} day of Christmas my true love gave to me\n" + ",\n".join(reversed(gifts[: i + 1])) + "."
        for i, day in enumerate(days)
    )


def cat_and_others() -> str:
    """ASCII art with wide blank and ruled areas."""
    rng = _rng()
    sky = "\n".join("".join(rng.choice("  " * 20 + "*.") for _ in range(70)) for _ in range(25))
    wave = "\n".join("~" * (70 - i) + "^" * i for i in range(12))
    box = "+" + "-" * 68 + "+\n" + ("|" + " " * 68 + "|\n") * 10 + "+" + "-" * 68 + "+"
    return f"{sky}\n{wave}\n{box}\n /\\_/\\\n( o.o )\n > ^ <\n"


def numbered_list(count: int) -> str:
    rng = _rng()
    verbs, things = (
        ["Check", "Clean", "Grease", "Replace", "Measure"],
        ["belt", "gate", "stone", "hopper", "shaft", "sieve"],
    )
    ends = ["set", "cut", "moved"]
    return "\n".join(
        f"{i}. {rng.choice(verbs)} the {rng.choice(things)} before the {rng.choice(things)} is {rng.choice(ends)}."
        for i in range(1, count + 1)
    )


def user_records(count: int) -> str:
    records = [
        {"id": i, "name": f"User {i}", "email": f"user{i}@example.com", "active": True} for i in range(1, count + 1)
    ]
    return json.dumps(records, indent=2)


def sections(count: int) -> str:
    words = [word.strip(".,;:") for word in ESSAY.split()]
    rng = _rng()

    def body(length: int) -> str:
        return " ".join(rng.choices(words, k=length)) + "."

    return "\n\n".join(f"## Item {i}\n\n### Summary\n\n{body(25)}\n\n### Details\n\n{body(40)}" for i in range(count))


def drafts() -> str:
    """A thought that writes its answer, checks it, and writes it out twice more."""
    return f"{THOUGHT}\nDraft:\n{ESSAY}\nIs that good? The tone is right.\n{ESSAY}\nFinal answer:\n{ESSAY}"


def brute_force(count: int) -> str:
    """Tedious, but each line brings a result."""
    return "\n".join(
        f"For n = {n} the square is {n * n}, which leaves {n * n % 97} modulo 97, so {n} is not it."
        for n in range(2, count)
    )


def sql_inserts(count: int) -> str:
    return "\n".join(f"INSERT INTO users (id, name, plan) VALUES ({i}, 'user{i}', 'free');" for i in range(count))


def unit_tests(count: int) -> str:
    return "\n".join(
        f"    def test_value_{i}(self):\n        self.assertEqual(convert({i}), '{hex(i)}')\n"
        "        self.assertIsNone(convert(None))\n"
        for i in range(count)
    )


NEGATIVES: dict[str, Callable[[], str]] = {
    "essay": lambda: ESSAY,
    "thought": lambda: THOUGHT,
    "essay twice": lambda: ESSAY * 2,
    "chinese": lambda: CHINESE,
    "chinese twice": lambda: CHINESE * 2,
    "song": lambda: SONG,
    "long essay, then a song": lambda: ESSAY + SONG,
    "twelve days": twelve_days,
    "markdown table": lambda: markdown_table(120),
    "markdown rule": lambda: ESSAY + "\n" + "|---" * 40 + "|\n" + "=" * 800,
    "csv of few values": lambda: csv_table(400),
    "csv of words": lambda: word_table(400, ","),
    "tsv of words": lambda: word_table(400, "\t"),
    "training plan": lambda: training_plan(100),
    "yaml": lambda: yaml_services(120),
    "log": lambda: log_lines(400),
    "heartbeats": lambda: heartbeat_log(400),
    "times table": lambda: times_table(20),
    "times grid": lambda: times_grid(30),
    "truth table": lambda: truth_table(6),
    "pi": lambda: pi_digits(3000),
    "a third in decimals": lambda: "0." + "3" * 1000,
    "a seventh in decimals": lambda: "0." + "142857" * 300,
    "base64": lambda: base64.encodebytes(_rng().randbytes(6000)).decode(),
    "base64 of zeros": lambda: base64.encodebytes(bytes(2000)).decode(),
    "hex": lambda: "\n".join(hashlib.sha256(bytes([i])).hexdigest() for i in range(200)),
    "dna": lambda: "".join(_rng().choices("ACGT", k=12_000)),
    "spaced dna": lambda: " ".join(_rng().choices("ACGT", k=6_000)),
    "coin flips": lambda: ", ".join(_rng().choices(["heads", "tails"], k=1500)),
    "bits": lambda: "".join(_rng().choices("01", k=9_000)),
    "zero matrix": lambda: json.dumps([[0] * 30] * 30),
    "identity matrix": lambda: "\n".join(" ".join("1" if i == j else "0" for j in range(40)) for i in range(40)),
    "ascii art": cat_and_others,
    "numbered list": lambda: numbered_list(200),
    "counting": lambda: ", ".join(map(str, range(1, 3000))),
    "user records": lambda: user_records(150),
    "same headers": lambda: sections(40),
    "drafts": drafts,
    "brute force": lambda: brute_force(400),
    "sql": lambda: sql_inserts(300),
    "unit tests": lambda: unit_tests(150),
    "blank table": lambda: "| Name | Mon | Tue |\n|---|---|---|\n" + "|      |     |     |\n" * 100,
    "html table": lambda: "<table>\n" + "<tr>\n<td>yes</td>\n<td>no</td>\n</tr>\n" * 30 + "</table>",
    "trailing spaces": lambda: ESSAY + " " * 3000,
}

WAIT = "Wait, I should double-check the sum of the digits again. "
PARAGRAPH = ESSAY[:2000]


def shuffled_pool(count: int) -> str:
    """The same few sentences in no fixed order."""
    rng = _rng()
    pool = [
        "Wait, maybe I should look at the problem again.",
        "Hmm, that does not seem right to me.",
        "Let me re-read the question once more.",
        "So the answer should be forty-two.",
        "But I am not sure about the last step.",
        "Okay, let me check the last step again.",
    ]
    return " ".join(rng.choice(pool) for _ in range(count))


def variations(count: int) -> str:
    """Sentences built anew from few parts, hardly one like another."""
    rng = _rng()
    slots = [
        ["Wait", "Hmm", "Okay", "But", "So"],
        ["maybe I should", "perhaps I could", "I think I must"],
        ["check the sum", "look at the sum", "go over the sum"],
        ["once more", "again", "another time"],
        ["because it may be wrong", "to be sure", "before I answer"],
    ]
    return ", ".join(" ".join(rng.choice(slot) for slot in slots) for _ in range(count))


def slipping(count: int) -> str:
    """A cycle in which now and then another sentence slips in."""
    rng = _rng()
    return "".join(WAIT if rng.random() > 0.03 else f"Sum {rng.randrange(999)} {rng.random()}. " for _ in range(count))


POSITIVES: dict[str, Callable[[], str]] = {
    "wait": lambda: "Wait, I should " * 500,
    "sentence": lambda: ESSAY + WAIT * 200,
    "last third": lambda: ESSAY * 3 + THOUGHT + WAIT * 60,
    "cut inside the cycle": lambda: ESSAY + (WAIT * 200)[:-17],
    "one character": lambda: ESSAY + "!" * 6000,
    "one token": lambda: "The answer is" + " very" * 2000,
    "two tokens": lambda: "The answer is" + " ha he" * 1500,
    "three tokens": lambda: THOUGHT + "\n- no yes" * 600,
    "blank lines": lambda: ESSAY + "\n" * 20_000,
    "digits": lambda: "0." + "142857" * 3000,
    "lines": lambda: ESSAY + "Step: check.\nResult: unclear.\nLet me try again.\n\n" * 80,
    "paragraph, 4 times": lambda: THOUGHT + PARAGRAPH * 4,
    "paragraph, 40 times": lambda: PARAGRAPH * 40,
    "code block": lambda: THOUGHT + "```python\nfor i in range(10):\n    print(i)\n```\nNo, that is wrong.\n" * 60,
    "json": lambda: '{"items": [' + '{"name": "wheel", "size": 4}, ' * 400,
    "counter": lambda: THOUGHT + " ".join(f"Step {i}: I should verify the answer again." for i in range(300)),
    "counter by sevens": lambda: "\n".join(
        f"For k = {i}, the value is still not an integer." for i in range(3, 4000, 7)
    ),
    "counter over lines": lambda: "\n".join(
        f"**Attempt {i}**\nI try the same approach again.\nIt does not work." for i in range(150)
    ),
    "shuffled pool": lambda: THOUGHT + shuffled_pool(300),
    "slips": lambda: ESSAY + slipping(400),
    "variations": lambda: THOUGHT + variations(400),
    "chinese": lambda: CHINESE + "等等，我应该再检查一遍答案。" * 200,
    "chinese, no stops": lambda: CHINESE + "好的好的我再想想" * 200,
    "chinese counter": lambda: "".join(f"第{i}步：我需要再次验证这个答案是否正确。" for i in range(300)),
    "japanese": lambda: "もう一度確認します。やはり違うようです。" * 150,
    "korean": lambda: "다시 한번 확인해 보겠습니다. " * 300,
    "hindi": lambda: "मुझे उत्तर फिर से जाँचना चाहिए। " * 200,
    "emoji": lambda: "So glad! " + "🎉🎊" * 800,
    "broke out of it": lambda: THOUGHT + WAIT * 200 + "\nAnyway. The answer is 405, by Legendre's formula.",
    "circles in the middle": lambda: THOUGHT + PARAGRAPH * 12 + ESSAY,
    "stammer in the middle": lambda: THOUGHT + " ha he" * 1500 + ESSAY,
}


@pytest.mark.parametrize("name", NEGATIVES)
def test_spares_texts_that_get_somewhere(name: str) -> None:
    assert find_loop(NEGATIVES[name]()) is None


@pytest.mark.parametrize("name", POSITIVES)
def test_finds_loops(name: str) -> None:
    text = POSITIVES[name]()
    loop = find_loop(text)
    assert loop is not None
    assert loop.repetitions >= loops.MIN_REPETITIONS
    assert loop.unit in text
    assert 0 < loop.length <= len(text) - loop.start
    assert loop.share == pytest.approx(loop.length / len(text))


def real_files() -> list[Path]:
    code = (
        sorted(STDLIB.glob("*.py"))
        + sorted((STDLIB / "encodings").glob("*.py"))
        + sorted((STDLIB / "json").glob("*.py"))
    )
    return [*code, *(sorted(LICENSES.iterdir()) if LICENSES.is_dir() else [])]


def test_spares_real_code_and_licenses_however_they_are_cut() -> None:
    files = real_files()
    assert len(files) > 200
    alarms = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")[:150_000]
        cuts = (text, text[: len(text) // 2], text[:8_000], text[-8_000:])
        alarms += [(path.name, len(cut), str(find_loop(cut))) for cut in cuts if find_loop(cut)]
    assert alarms == []


def test_finds_loops_after_real_text() -> None:
    """Whatever came before, a loop of the last 30 % is found."""
    missed = []
    for path in real_files():
        before = path.read_text(encoding="utf-8", errors="replace")[:14_000]
        if len(before) < 5_000:
            continue
        for unit in ("Wait, I should check this once more. ", "So no.\n", before[-700:]):
            text = before + unit * max(4, len(before) * 3 // 7 // len(unit))
            if not find_loop(text):
                missed.append((path.name, unit))
    assert missed == []


def test_says_where_and_what() -> None:
    loop = find_loop(ESSAY + WAIT * 100)
    assert loop is not None and loop.kind == "run"
    assert (loop.start, loop.length) == (len(ESSAY), 100 * len(WAIT))
    assert (loop.unit, loop.repetitions) == (WAIT, 100)
    assert "100 times" in str(loop) and WAIT.strip() in str(loop)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("paragraph, 4 times", "run"),
        ("shuffled pool", "sentences"),
        ("counter", "counter"),
        ("counter by sevens", "counter"),
        ("chinese counter", "counter"),
        ("variations", "words"),
    ],
)
def test_tells_kinds_of_loops_apart(name: str, kind: str) -> None:
    loop = find_loop(POSITIVES[name]())
    assert loop is not None and loop.kind == kind


def test_numbers_that_bring_news_are_no_counter() -> None:
    rng = _rng()
    template = "The value at position {} is {}, which is not the one that we need here."
    counted = "\n".join(template.format(i, 3 * i) for i in range(200))
    measured = "\n".join(template.format(i, rng.randrange(10**6)) for i in range(200))
    assert find_loop(counted) is not None
    assert find_loop(measured) is None


@pytest.mark.parametrize("text", ["", " ", "ok", "no " * 50, "\ud800" * 10, "Wait. " * 30])
def test_short_texts_never_loop(text: str) -> None:
    assert find_loop(text) is None


def test_survives_lone_surrogates_and_controls() -> None:
    assert find_loop("\ud83d\x00" * 5000) is not None


@given(unit=st.text(min_size=1, max_size=300), before=st.text(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_unit_repeated_long_enough_is_a_loop(unit: str, before: str) -> None:
    loop = find_loop(before + unit * (6_000 // len(unit.encode("utf-8", "surrogatepass")) + 5))
    assert loop is not None and loop.kind == "run"


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=80), max_size=40), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_random_lines_are_no_loop(lines: list[str], seed: int) -> None:
    """Each line is made new by a hash, so nothing stands there four times."""
    text = "\n".join(f"{line} {hashlib.md5(f'{seed} {i}'.encode()).hexdigest()}" for i, line in enumerate(lines * 3))
    assert find_loop(text) is None


@given(period=st.integers(1, 40), length=st.integers(60, 600), slip=st.integers(0, 599), first=st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_common_prefix_matches_its_definition(period: int, length: int, slip: int, first: int) -> None:
    letters = [chr(97 + i % period) for i in range(length)]
    letters[slip % length] = "!"
    text, second = "".join(letters), first + period
    pairs = zip(text[first:], text[second:], strict=False)
    slow = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert loops._common_prefix(text, first, second) == max(0, slow)


def test_work_grows_with_the_text_only() -> None:
    """Counted in comparisons, not in seconds: texts made to mislead the search for the period cost no more."""
    spaces = (" " * 400 + "x") * 300
    blocks = "".join("ab" * 200 + str(i) for i in range(300))
    for text in (spaces, blocks):
        compared = 0

        class Counting(str):
            def __getitem__(self, key: slice) -> str:  # type: ignore[override]
                nonlocal compared
                piece = str.__getitem__(self, key)
                compared += len(piece) if isinstance(key, slice) else 1
                return piece

        backward = Counting(text[::-1])
        for eighths in range(8, 3, -1):
            loops._run_around(text, backward, len(text) * eighths // 8)
        assert compared < 2 * loops.MAX_CANDIDATES * len(text)
