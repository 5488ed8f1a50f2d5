"""Write a tiny Qwen3-architecture GGUF that llama.cpp serves at a hundred requests a second on one core.

The weights are not trained but written down. One residual vector of 128 numbers holds three fields:

    state      one-hot: which state of the grammar (tests/tiny/grammar.py) the last token puts the text in
    signature  +-1 per dimension, from a hash of the token; two flags beside it (constant; prompt text or not)
    mood       empty in the embedding; the only layer's attention writes here what the prompt looks like

Attention looks at prompt text alone (single bytes; the model's own words are whole tokens). The rotary embedding lets
each of its heads see every 16th byte only, counted back from the present token: the order of the bytes counts, and each
next word is steered by other bytes. The output matrix holds log-probabilities of the grammar, by state, plus a random
direction in mood space for each word: which words come depends on the prompt, what may follow what does not. (A single
changed byte may leave a short answer as it is, with the same seed; the longer the answer, the less likely that is.)

The bytes that a head sees weigh exactly the same and hold +-1, so that even half-precision sums are exact in any order:
batches of any make-up give the same logits, and the same seed the same answer.

    python -m tests.tiny.gguf_model OUT [--answer-clauses 40] [--empty-answers 0.9] [--leak-tags] ...
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import gguf
import numpy as np

from tests.tiny import grammar as g

CONTEXT = 32768
WIDTH, STATES, SIGNATURE, MOOD = 128, 62, 32, 32
CONSTANT, IS_PROMPT = STATES, STATES + 1
SIGNATURE_AT, MOOD_AT = slice(64, 96), slice(96, 128)
HEADS, HEAD = 8, 32
PERIOD = 16  # bytes from one that a head sees to the next; a power of two keeps rotations exact
FEED_FORWARD = 32
# Pairs of rotary dimensions: one that turns once in PERIOD tokens, one that hardly turns.
WAVE, SLOWEST = 1, HEAD // 2 - 1
ROPE_BASE = (PERIOD / (2 * np.pi)) ** (HEAD / 2 / WAVE)
EPSILON = 1e-6
STATE_SIZE = 4.0  # of the one-hot, against 1.0 for each signature dimension
SHARPNESS = 60.0  # of queries: a byte in step outweighs its neighbours by e**19, and any byte all other tokens
# Root mean square of every embedding: what norms divide by.
ROW_SIZE = np.sqrt((STATE_SIZE**2 + SIGNATURE + 2) / WIDTH)
# Keys are cached in half precision: with this scale no value of the wave lies near a rounding boundary.
KEY_SIZE = 1.965
MOOD_SIZE = 0.25  # small against the state, so that the final norm is nearly constant
# Pull of the mood on words that are steered, and on forks (so that greedy text ends too).
STEER, TIE_BREAK = 4.0, 0.3
COMMON = " "  # bytes so frequent that they would make all moods alike
FORBIDDEN = -30.0


@dataclass(frozen=True)
class Knobs:
    """What is wrong with the model; the defaults are a healthy one.

    Shares are probabilities at temperature 1; samplers that cut rare choices off (min-p, top-p) drop small ones.
    """

    answer_clauses: int = (
        2  # mean clauses of about 7 tokens per answer, 1-256 (the nearest product of two numbers <= 16)
    )
    thought_sentences: int = 2  # mean sentences of about 6 tokens per thought, 1-8
    open_thoughts: float = 0.0  # share of thoughts that ramble on and never close
    looping_thoughts: float = 0.0  # share of thoughts that repeat one sentence for ever
    empty_answers: float = 0.0  # share of answers without a word in them, thinking or not
    leak_tags: bool = False  # a chat template from which no server learns how to separate thoughts
    boilerplate: bool = False  # with thinking off, always the same six tokens

    def __post_init__(self) -> None:
        limits = (
            ("answer_clauses", self.answer_clauses, 1, 256),
            ("thought_sentences", self.thought_sentences, 1, len(g.THOUGHT_LINKS) + 1),
            ("open_thoughts + looping_thoughts", self.open_thoughts + self.looping_thoughts, 0, 1),
            *((name, getattr(self, name), 0, 1) for name in ("open_thoughts", "looping_thoughts", "empty_answers")),
        )
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}: must be from {low} to {high}")


def make_grammar(knobs: Knobs) -> g.Grammar:
    """The grammar the model speaks, faults included."""
    out = g.Grammar()
    for token in (g.THINK, g.END_THINK, g.THOUGHT_CUE, g.ANSWER_CUE):
        out.add((token,), token)
    ramble, loop, head = g.RAMBLE[0], g.LOOP[:1], g.THOUGHT_HEAD
    normal = 1 - knobs.open_thoughts - knobs.looping_thoughts
    opening = ((head, normal), (ramble, knobs.open_thoughts), (loop, knobs.looping_thoughts))
    out.rule(g.THINK, *opening)
    # The leaky template does not open the thought, so the model does.
    out.rule(g.THOUGHT_CUE, *(((g.THINK,), 1.0),) if knobs.leak_tags else opening)
    _add_thoughts(out, knobs)
    _add_answers(out, knobs)
    return out


def _add_thoughts(out: g.Grammar, knobs: Knobs) -> None:
    out.add((*g.THOUGHT_HEAD, *g.THOUGHT_LINKS), "thought.start")
    out.rule("thought.start", (g.THOUGHT[0], 1.0))
    out.fork(out.chain("thought", g.THOUGHT), (".\n",), g.THOUGHT_LINKS, knobs.thought_sentences)
    out.add((".\n",), "thought.end")
    out.rule("thought.end", ((g.END_THINK,), 1.0))
    out.rule(out.chain("ramble", g.RAMBLE), (g.RAMBLE[0], 1.0))
    out.rule(out.chain("loop", tuple((word,) for word in g.LOOP)), (g.LOOP[:1], 1.0))


def _add_answers(out: g.Grammar, knobs: Knobs) -> None:
    beginning = ((g.ANSWER_HEAD, 1 - knobs.empty_answers), ((g.END_OF_TURN,), knobs.empty_answers))
    out.rule(g.END_THINK, *beginning)
    out.rule(g.ANSWER_CUE, *(((g.BOILERPLATE[:1], 1.0),) if knobs.boilerplate else beginning))
    out.rule("other", *beginning)
    clauses, sentences = g.answer_ways(knobs.answer_clauses)
    out.add(g.CLAUSE_LINKS, "answer.link")
    out.rule("answer.link", (g.ANSWER[0], 1.0))
    last = out.chain("answer", g.ANSWER)
    out.add((*g.ANSWER_HEAD, *g.SENTENCE_LINKS), "answer.0")
    # Two forks in a row, so that no choice is rarer than 1/16: whether the sentence ends, then whether the answer does.
    stop = (".",)
    out.fork(last, stop, g.CLAUSE_LINKS, clauses)
    out.add(stop, "answer.stop")
    out.fork("answer.stop", (g.END_OF_TURN,), g.SENTENCE_LINKS, sentences)
    out.rule(out.chain("boilerplate", tuple((w,) for w in g.BOILERPLATE)), ((g.END_OF_TURN,), 1.0))


def make(path: Path, knobs: Knobs = Knobs()) -> Path:
    """Write the model with these faults to `path`; the same knobs give the same bytes. Returns `path`."""
    speech = make_grammar(knobs)
    tokens, kinds = _vocabulary(speech)
    out = gguf.GGUFWriter(path, "qwen3")
    _add_settings(out)
    _add_tokenizer(out, tokens, kinds)
    template = "chat_leaky.jinja" if knobs.leak_tags else "chat_thinking.jinja"
    out.add_chat_template((Path(__file__).parent / template).read_text(encoding="utf-8"))
    for name, array in (_attention() | _ends(speech, tokens)).items():
        out.add_tensor(name, array.astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def _byte_letters() -> list[str]:
    """The printable character that stands for each byte in GPT-2's byte-level vocabularies."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]


def _vocabulary(speech: g.Grammar) -> tuple[list[str], list[gguf.TokenType]]:
    """Token texts as written (a lone byte as its Latin-1 character) and their kinds: bytes, words, marks."""
    lone = [chr(byte) for byte in range(256)]
    thoughts = [g.THINK, g.END_THINK]
    words = [token for token in speech.state_of if token not in thoughts and token not in lone]
    control = [g.END_OF_TEXT, g.TURN, g.END_OF_TURN]
    kind = gguf.TokenType
    kinds = [kind.NORMAL] * (256 + len(words)) + [kind.CONTROL] * 3 + [kind.USER_DEFINED] * 2
    return lone + words + control + thoughts, kinds


def _add_settings(out: gguf.GGUFWriter) -> None:
    out.add_name("Tiny test model")
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    out.add_block_count(1)
    out.add_context_length(CONTEXT)
    out.add_embedding_length(WIDTH)
    out.add_feed_forward_length(FEED_FORWARD)
    out.add_head_count(HEADS)
    out.add_head_count_kv(1)
    out.add_key_length(HEAD)
    out.add_value_length(HEAD)
    out.add_rope_freq_base(float(ROPE_BASE))
    out.add_layer_norm_rms_eps(EPSILON)


def _add_tokenizer(out: gguf.GGUFWriter, tokens: list[str], kinds: list[gguf.TokenType]) -> None:
    letters = _byte_letters()
    marks = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    spelled = [
        t if kind in marks else "".join(letters[b] for b in t.encode("latin-1"))
        for t, kind in zip(tokens, kinds, strict=True)
    ]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(spelled)
    out.add_token_types(kinds)
    # The only merge: all other text is read byte by byte, so a prompt has as many tokens as bytes.
    out.add_token_merges([f"{letters[10]} {letters[10]}"])
    out.add_bos_token_id(tokens.index(g.END_OF_TEXT))
    out.add_pad_token_id(tokens.index(g.END_OF_TEXT))
    out.add_eos_token_id(tokens.index(g.END_OF_TURN))
    out.add_add_bos_token(False)


def _signs(name: str, count: int) -> np.ndarray:
    """`count` (a multiple of 8) numbers of +1 or -1 that depend on the name only."""
    digest = np.frombuffer(hashlib.shake_256(name.encode()).digest(count // 8), dtype=np.uint8)
    return np.unpackbits(digest).astype(np.float64) * 2 - 1


def _levels(name: str) -> np.ndarray:
    """MOOD numbers of mean square about 1 that depend on the name only.

    Of many levels, not two: moods are small fractions, and with signs alone two words would often be exactly as likely,
    and their order in the sampler, so the answer, a matter of the last bit.
    """
    digest = np.frombuffer(hashlib.shake_256(name.encode()).digest(MOOD), dtype=np.uint8)
    return (digest - 127.5) / 73.9


def _ends(speech: g.Grammar, tokens: list[str]) -> dict[str, np.ndarray]:
    """Embedding and output matrices, both [tokens, WIDTH]."""
    index = {token: i for i, token in enumerate(tokens)}
    states = {state: i for i, state in enumerate(speech.follows)}
    if len(states) > STATES:
        raise ValueError(f"the grammar has {len(states)} states, the model room for {STATES}")
    embedding = np.zeros((len(tokens), WIDTH))
    for token, row in zip(tokens, embedding, strict=True):
        state = speech.state_of.get(token, "other")
        row[states[state]] = STATE_SIZE
        row[SIGNATURE_AT] = _signs(token, SIGNATURE)
        row[CONSTANT] = 1
        row[IS_PROMPT] = 1 if state == "other" and len(token) == 1 and token not in COMMON else -1
    output = np.zeros((len(tokens), WIDTH))
    output[:, : len(states)] = FORBIDDEN / STATE_SIZE * ROW_SIZE
    for state, choices in speech.follows.items():
        for token, p in choices.items():
            output[index[token], states[state]] = np.log(p) / STATE_SIZE * ROW_SIZE
    scale = ROW_SIZE / MOOD_SIZE / np.sqrt(MOOD)
    for token, row in zip(tokens, output, strict=True):
        pull = STEER if token in speech.steered else TIE_BREAK
        row[MOOD_AT] = pull * scale * _levels(f"pull {token}")
    return {"token_embd.weight": embedding, "output.weight": output, "output_norm.weight": np.ones(WIDTH)}


def _attention() -> dict[str, np.ndarray]:
    """The one layer: attention writes the mood, the feed-forward part nothing."""
    query, key = np.zeros((HEADS, HEAD, WIDTH)), np.zeros((HEAD, WIDTH))
    for head in range(HEADS):
        phase = -2 * np.pi * head / HEADS
        query[head, [WAVE, WAVE + HEAD // 2], CONSTANT] = 2 * np.cos(phase), 2 * np.sin(phase)
        query[head, SLOWEST, CONSTANT] = 3
    key[WAVE, CONSTANT] = 1
    key[SLOWEST, IS_PROMPT] = 1
    value = np.zeros((HEAD, WIDTH))
    value[:, SIGNATURE_AT] = ROW_SIZE * np.eye(SIGNATURE)
    output = np.zeros((WIDTH, HEADS * HEAD))
    mix = MOOD_SIZE / np.sqrt(HEADS * HEAD)
    output[MOOD_AT] = [mix * _signs(f"mood {i}", HEADS * HEAD) for i in range(MOOD)]
    layer = {
        "attn_norm": np.ones(WIDTH),
        "attn_q": query.reshape(HEADS * HEAD, WIDTH),
        "attn_k": key,
        "attn_v": value,
        "attn_output": output,
        "attn_q_norm": np.full(HEAD, SHARPNESS),
        "attn_k_norm": np.full(HEAD, KEY_SIZE),
        "ffn_norm": np.ones(WIDTH),
        "ffn_gate": np.zeros((FEED_FORWARD, WIDTH)),
        "ffn_up": np.zeros((FEED_FORWARD, WIDTH)),
        "ffn_down": np.zeros((WIDTH, FEED_FORWARD)),
    }
    return {f"blk.0.{name}.weight": array for name, array in layer.items()}


def main() -> None:
    """Write a model; every knob is an option."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiny.gguf_model", description="Write a tiny GGUF model.")
    parser.add_argument("out", type=Path)
    for knob in fields(Knobs):
        flag = "--" + knob.name.replace("_", "-")
        if isinstance(knob.default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(knob.default), default=knob.default)
    options = vars(parser.parse_args())
    out = options.pop("out")
    try:
        knobs = Knobs(**options)
    except ValueError as error:
        parser.error(str(error))
    make(out, knobs)


if __name__ == "__main__":
    main()
