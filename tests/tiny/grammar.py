"""What the tiny model says: a probabilistic grammar in which the last token alone decides what may follow.

Every token belongs to one state, and every state has its own distribution over next tokens. Words are therefore never
shared between two tracks (a thought, an answer, ...): the token itself remembers where the text stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field

END_OF_TURN, TURN, END_OF_TEXT = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
THINK, END_THINK = "<think>", "</think>"
# The chat template ends a prompt with one newline where a thought begins, with two where an answer begins.
THOUGHT_CUE, ANSWER_CUE = "\n", "\n\n"

Slots = tuple[tuple[str, ...], ...]

# Clauses have 7 tokens and thoughts 5: prime to the period of the attention, so that greedy text seldom circles.
THOUGHT_HEAD = ("Okay, I",)
THOUGHT: Slots = (
    (" weigh", " recall", " compare", " picture", " test"),
    (" what", " how", " why", " whether"),
    (" they", " someone", " people", " we"),
    (" asked", " meant", " expected", " needed"),
)
THOUGHT_LINKS = (". Then I", ". Now I", ". Also I", ". Second, I", ". Third, I", ". Besides, I", ". Last, I")
RAMBLE: Slots = (
    ("Perhaps",),
    (" it", " this", " that"),
    (" may be", " might be", " could be", " seems"),
    (" longer", " older", " nearer", " wider", " colder"),
    (" than", " or"),
    (" before...\n", " usual...\n", " planned...\n", " it looks...\n"),
)
LOOP = ("Wait", ", did I", " already", " count", " those?", " Once", " more.\n")
ANSWER_HEAD = ("The",)
ANSWER: Slots = (
    (" the", " one", " every", " each"),
    (" miller", " wheel", " river", " baker", " mule", " sieve", " stone", " carter"),
    (" grinds", " carries", " sifts", " stores", " turns", " sells"),
    (" four", " nine", " twelve", " thirty", " sixty", " ninety", " hundred"),
    (" bushels", " grains", " loaves", " barrels", " baskets", " pounds"),
    (" before dawn", " by noon", " at dusk", " in spring", " in the rain", " without rest", " for the town"),
)
CLAUSE_LINKS = (
    *(", and", ", so", ", but", ", yet", ", while", ", since", ", until", ", where"),
    *("; then", "; later", "; next", "; soon", "; still", "; again", "; meanwhile"),
)
SENTENCE_LINKS = (
    *(" The", " One", " Every", " Each", " This", " That", " Another", " No"),
    *(" Our", " Their", " Your", " His", " Her", " My", " Whose"),
)
BOILERPLATE = ("Sure!", " I", " am", " happy", " to", " help.")


@dataclass
class Grammar:
    """Tokens and their states, and each state's distribution over next tokens."""

    state_of: dict[str, str] = field(default_factory=dict)
    follows: dict[str, dict[str, float]] = field(default_factory=dict)
    steered: set[str] = field(default_factory=set)  # tokens whose choice the prompt influences

    def add(self, tokens: tuple[str, ...], state: str, *, steered: bool = False) -> None:
        for token in tokens:
            if self.state_of.setdefault(token, state) != state:
                raise ValueError(f"token {token!r} stands in two states: {self.state_of[token]} and {state}")
        if steered and len(tokens) > 1:
            self.steered.update(tokens)

    def rule(self, state: str, *choices: tuple[tuple[str, ...], float]) -> None:
        """After `state`: each group of tokens has its probability, shared equally within the group."""
        self.follows[state] = {token: p / len(group) for group, p in choices if p > 0 for token in group}

    def chain(self, name: str, slots: Slots) -> str:
        """Words that fill `slots` one after another; returns the state after the last slot."""
        for i, words in enumerate(slots):
            self.add(words, f"{name}.{i}", steered=True)
            if i:
                self.rule(f"{name}.{i - 1}", (words, 1.0))
        return f"{name}.{len(slots) - 1}"

    def fork(self, state: str, exits: tuple[str, ...], links: tuple[str, ...], ways: int) -> None:
        """After `state`: leave with probability 1/ways, go on by a link otherwise.

        All ways are equally likely, so neither temperature nor top-p nor min-p changes the mean number of rounds.
        """
        self.rule(state, (exits, 1 / ways), (links[: ways - 1], 1 - 1 / ways))


def answer_ways(mean_clauses: int) -> tuple[int, int]:
    """Fan-outs (clauses per sentence, sentences) whose product, the mean number of clauses, is nearest to the wish."""
    most = len(CLAUSE_LINKS) + 1
    pairs = [(a, b) for a in range(1, most + 1) for b in range(a, most + 1)]
    return min(pairs, key=lambda pair: (abs(pair[0] * pair[1] - mean_clauses), pair[1]))
