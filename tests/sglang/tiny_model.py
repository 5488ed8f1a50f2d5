"""Make a tiny Qwen3 model folder that the real SGLang serves on CPU: `python tests/sglang/tiny_model.py OUT [--seed
N]`.

Runs inside the environment of build_env.py (it needs torch, transformers and tokenizers). 1 MB of weights, two layers,
4096 tokens of context, a chat template with thinking mode.

The weights are random except for a few dimensions of the hidden state that carry the kind of the last token,
"thought" or "answer". They make the model speak like a thinking model: a thought of random words, `</think>`, an
answer of random words, end. Everything else (which words, how they depend on the prompt) is left to chance, with a
fixed seed.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTEXT = 4096
IN_THOUGHT, IN_ANSWER, CLOSED, FIRST = range(4)  # dimensions of the hidden state with a meaning
MARKED = 4
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and '</think>' in message.content -%}
{{ message.content.split('</think>')[-1].lstrip('\\n') }}
{%- else -%}
{{ message.content }}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false -%}
{{ '<think>\\n\\n</think>\\n\\n' }}
{%- else -%}
{{ '<think>\\n' }}
{%- endif -%}
{%- endif -%}
"""
TEXT = """\
A shard is a run of consecutive prompts, and a prompt is a question that waits for its answer.
The server reads the question, thinks about it for a while, and then writes down what it has found.
When the light turns green the pump starts, and water climbs through the narrow pipe to the tank on the roof.
Seven sisters bought nine apples each, gave away a dozen of them, and counted what was left on the kitchen table.
To add two fractions, bring them to the same denominator first; only then may the numerators be summed.
The train to the coast leaves at a quarter past six, stops at every village, and arrives before the shops open.
If the key is not in the drawer, look under the blue vase; if it is not there either, ask the neighbour.
A triangle with sides three, four and five has a right angle, because nine and sixteen make twenty-five.
Bread needs flour, water, salt and time, and most bakers would say that time is the rarest of the four.
The old clock strikes the hour twice, once for those who are awake and once for those who were asleep.
Rain fell all morning on the harbour, so the boats stayed in and the crews mended their nets and sails.
Sorting a list by halves costs far fewer comparisons than looking for the smallest element again and again.
She measured the field with a rope of ten knots, wrote the numbers on a slate, and drew the map at night.
Nothing that was finished may be lost, nothing that is worthless may be kept, and every fault must be said aloud.
Wait, let me think again: the second pipe fills the tank in half the time, therefore both together need a third.
So the result is forty-two, which agrees with the estimate made at the beginning of this page.
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over TEXT, with the chat and thinking marks of the Qwen3 family."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXT.splitlines(keepends=True),
        trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    # The blank line is a token of its own so that "<think>\n" and "<think>\n\n</think>\n\n" end in different tokens.
    marks = [AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>", "\n\n")]
    tokenizer.add_tokens(marks)
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, thought: float, answer: float) -> Qwen3ForCausalLM:
    """The model of the module's docstring; `thought` and `answer` are the mean lengths of both parts in tokens."""
    vocabulary = math.ceil(len(tokenizer) / 64) * 64
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    model = Qwen3ForCausalLM(config)
    words = _plain_words(tokenizer)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.06)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[:MARKED] = 0.0  # no layer may write over the dimensions with a meaning
        _write_grammar(model, tokenizer, words, thought, answer)
    return model.to(torch.bfloat16)


def _plain_words(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of the tokens that are whole printable ASCII text, so that any sequence of them is clean text."""
    ids = range(len(tokenizer))
    texts = {i: tokenizer.decode([i]) for i in ids}
    marks = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return [i for i in ids if i not in marks and texts[i].isascii() and texts[i].isprintable() and len(texts[i]) > 1]


def _write_grammar(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, words: list[int], thought: float, answer: float
) -> None:
    """Give the first MARKED dimensions of the hidden state, which only the last token sets, their meaning.

    With the kind at K after the final norm, a word of the right kind has the logit K + noise, any other token -K, and
    the mark that ends the part ln(words / length) more than a word, so it comes after `length` tokens on average.
    `</think>` is always followed by a blank line, and neither part can end on its first token.
    """
    close, end = tokenizer.convert_tokens_to_ids(["</think>", "<|im_end|>"])
    blank, newline = tokenizer.encode("\n\n")[0], tokenizer.encode("\n")[0]
    noise = 1.0
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    kind = math.sqrt(model.config.hidden_size / 2)  # half of a normalised hidden state's length lies in its kind
    in_thought, in_answer = words[0::2], words[1::2]
    embedding.normal_(std=1.0 / math.sqrt(2))
    embedding[:, :MARKED] = 0.0
    embedding[:, IN_THOUGHT] = kind
    embedding[[*in_answer, close, blank], IN_THOUGHT] = 0.0
    embedding[[*in_answer, blank], IN_ANSWER] = kind
    embedding[close, CLOSED] = kind
    embedding[[newline, blank], FIRST] = kind / 2
    head.normal_(std=noise / kind)
    head[:, :MARKED] = -1.0
    head[:, FIRST] = 0.0
    head[in_thought, IN_THOUGHT] = 1.0
    head[in_answer, IN_ANSWER] = 1.0
    head[blank, CLOSED] = 1.0
    for token, dimension, count, length in (
        (close, IN_THOUGHT, len(in_thought), thought),
        (end, IN_ANSWER, len(in_answer), answer),
    ):
        head[token] = 0.0
        head[token, :MARKED] = -1.0
        head[token, dimension] = 1.0 + (noise**2 / 2 + math.log(count / length)) / kind
        head[token, FIRST] = -4.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny Qwen3 model folder for the real SGLang on CPU.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--thought", type=float, default=24, help="mean length of a thought in tokens (default 24)")
    parser.add_argument("--answer", type=float, default=16, help="mean length of an answer in tokens (default 16)")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.thought, args.answer)
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    defaults = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.95, top_k=20, eos_token_id=[eos, pad], pad_token_id=pad
    )
    defaults.save_pretrained(args.out)
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{args.out}: {len(tokenizer)} tokens, {parameters} parameters")


if __name__ == "__main__":
    main()
