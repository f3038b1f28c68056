"""Train the small chat model that ships inside the package, from a play text.

Reads a script in the "tiny Shakespeare" layout, makes chat conversations of it, trains a
tokenizer and a Llama, and writes a Hugging Face model directory. The shipped weights:

    python training/train_embedded.py --out aioserve/model_source/embedded \
        --data tinyshakespeare.txt
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

PAD, END, USER, ASSISTANT = 0, 1, 2, 3
SPECIALS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
IGNORE = -100
MAX_LEN = 4096

# How the training tokens are shared out over the row lengths; the second table is for the last
# part of the run, so that the model is used to the whole range of positions that it claims.
SHORT_MIX = {64: 0.08, 128: 0.17, 256: 0.2, 512: 0.3, 1024: 0.25}
LONG_MIX = {64: 0.08, 128: 0.17, 256: 0.15, 512: 0.15, 1024: 0.15, 2048: 0.15, 4096: 0.15}

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for part in content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
    {%- if message.role in ('system', 'developer') -%}
        {%- set ns.system = ns.system + text(message.content) + ' ' -%}
    {%- elif message.role == 'assistant' -%}
        {{- '<|assistant|>' + text(message.content) + '<|end|>' -}}
    {%- else -%}
        {{- '<|user|>' + ns.system + text(message.content) + '<|end|>' -}}
        {%- set ns.system = '' -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def parse_turns(text: str) -> list[str]:
    """The speeches of the play in order, each on one line, without the speakers' names."""
    turns: list[str] = []
    for block in text.split("\n\n"):
        lines = [line.strip() for line in block.strip().split("\n")]
        if lines and lines[0].endswith(":"):
            lines = lines[1:]
        speech = " ".join(" ".join(lines).split())
        if speech:
            turns.append(speech)
    return turns


def split_turns(
    turns: list[str], rng: random.Random, parts: int, chars: int
) -> tuple[list[list[str]], list[list[str]]]:
    """Hold out `parts` stretches of at least `chars` characters; returns (train, held out)."""
    stride = len(turns) // parts
    train: list[list[str]] = []
    held: list[list[str]] = []
    for n in range(parts):
        region = turns[n * stride : (n + 1) * stride if n + 1 < parts else len(turns)]
        total = sum(len(turn) for turn in region)
        target = rng.uniform(0.1, 0.9) * max(0, total - chars)
        start = seen = 0
        while seen < target:
            seen += len(region[start])
            start += 1
        end, size = start, 0
        while end < len(region) and size < chars:
            size += len(region[end])
            end += 1
        held.append(region[start:end])
        train.extend(piece for piece in (region[:start], region[end:]) if len(piece) > 1)
    return train, held


def train_tokenizer(segments: list[list[str]], vocab_size: int) -> Tokenizer:
    """A byte-level BPE: any UTF-8 text survives the round trip, nothing is added to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((turn for segment in segments for turn in segment), trainer)
    return tokenizer


class Encoder:
    """Encodes text word by word; some words are cut in two at random, as data augmentation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.pieces: dict[str, list[int]] = {}
        self.words: dict[str, list[str]] = {}

    def piece(self, piece: str) -> list[int]:
        if piece not in self.pieces:
            self.pieces[piece] = [token.id for token in self.tokenizer.model.tokenize(piece)]
        return self.pieces[piece]

    def __call__(self, text: str, rng: random.Random | None = None, cut: float = 0.0) -> list[int]:
        if text not in self.words:
            split = self.tokenizer.pre_tokenizer.pre_tokenize_str(text)
            self.words[text] = [word for word, _ in split]
        ids: list[int] = []
        for word in self.words[text]:
            if rng is not None and len(word) > 2 and rng.random() < cut:
                at = rng.randrange(1, len(word))
                ids += self.piece(word[:at]) + self.piece(word[at:])
            else:
                ids += self.piece(word)
        return ids


def stutter(ids: list[int], rng: random.Random) -> list[int]:
    """Repeat a few tokens at some point of a speech, several times; the repeats are marked (as
    negative numbers) so that they are read but not learnt. What is learnt is to go on after
    them, without which greedy decoding soon repeats itself for ever."""
    size = rng.randint(1, min(12, len(ids)))
    end = rng.randint(size, len(ids))
    repeats = [~token for token in ids[end - size : end]] * rng.randint(1, max(2, 16 // size))
    return ids[:end] + repeats + ids[end:]


def make_rows(
    segments: list[list[str]],
    encode: Encoder,
    rng: random.Random,
    mix: dict[int, float],
    cut: float,
    args: argparse.Namespace,
) -> dict[int, list[list[int]]]:
    """One pass with each parity, so that every speech is once a reply; {row length: rows}.

    A row begins with a user turn (or is plain prose) and is filled with the turns that follow.
    """
    lengths = list(mix)
    weights = [mix[length] / length for length in lengths]
    rows: dict[int, list[list[int]]] = defaultdict(list)
    for parity in (0, 1):
        for segment in segments:
            begin = parity
            while begin < len(segment):
                length = rng.choices(lengths, weights)[0]
                is_prose = rng.random() < args.prose
                row: list[int] = []
                turn = begin
                while turn < len(segment) and len(row) <= length:
                    ids = encode(segment[turn], rng, cut)
                    if rng.random() < args.stutter:
                        ids = stutter(ids, rng)
                    if is_prose:
                        # One document may hold several speeches, each on a line of its own.
                        last = rng.random() < 0.15 or turn + 1 == len(segment)
                        row += ids + ([END] if last else encode("\n"))
                    else:
                        row += [ASSISTANT if (turn - begin) % 2 else USER, *ids, END]
                    turn += 1
                if len(row) > 16:
                    rows[length].append(row[: length + 1])
                # A speech that was cut off comes again, with the turn that it answers.
                following = turn - 1 if len(row) > length + 1 else turn
                following -= (following - begin) % 2
                begin = max(following, begin + 2)
    return rows


def batch_of(rows: list[list[int]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((len(rows), length + 1), PAD)
    for n, row in enumerate(rows):
        ids[n, : len(row)] = torch.tensor(row)
    targets = ids[:, 1:].clone()
    targets[(targets == PAD) | (targets < 0)] = IGNORE
    return torch.where(ids < 0, ~ids, ids)[:, :-1], targets


def batches(
    segments: list[list[str]], encode: Encoder, args: argparse.Namespace
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The training steps, in order; each holds about `--tokens` tokens of one row length."""
    rng = random.Random(args.seed)
    step = 0
    while True:
        progress = step / args.steps
        mix = SHORT_MIX if progress < args.long_from else LONG_MIX
        cut = args.cut if progress < args.clean_from else 0.0
        groups: list[tuple[int, list[list[int]]]] = []
        for length, rows in make_rows(segments, encode, rng, mix, cut, args).items():
            rng.shuffle(rows)
            size = max(1, args.tokens // length)
            groups += [(length, rows[n : n + size]) for n in range(0, len(rows) - size + 1, size)]
        rng.shuffle(groups)
        for length, rows in groups:
            yield batch_of(rows, length)
            step += 1
            if step == args.steps:
                return


@dataclass
class Loss:
    nats: float = 0.0
    tokens: int = 0
    chars: int = 0

    @property
    def per_token(self) -> float:
        return self.nats / max(1, self.tokens)

    @property
    def per_char(self) -> float:
        return self.nats / max(1, self.chars)


def token_losses(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return loss.view_as(targets)


def chat_rows(segment: list[str], encode: Encoder, length: int) -> list[list[int]]:
    """The segment as conversations of at most `length` tokens, in both parities."""
    rows: list[list[int]] = []
    for parity in (0, 1):
        row: list[int] = []
        turn = 0
        for speech in segment[parity:]:
            ids = encode(speech)
            if row and turn % 2 == 0 and len(row) + len(ids) > length:
                rows.append(row)
                row, turn = [], 0
            row += [ASSISTANT if turn % 2 else USER, *ids, END]
            turn += 1
        rows.append(row)
    return [row[: length + 1] for row in rows]


@torch.no_grad()
def evaluate(
    model: nn.Module, segments: list[list[str]], encode: Encoder, tokenizer: Tokenizer
) -> Loss:
    """Chat loss over the text and the end tokens (the role tokens are given, not predicted)."""
    model.eval()
    rows = sorted((r for s in segments for r in chat_rows(s, encode, 1024)), key=len)
    out = Loss()
    for n in range(0, len(rows), 8):
        part = rows[n : n + 8]
        ids, targets = batch_of(part, max(map(len, part)) - 1)
        targets[(targets == USER) | (targets == ASSISTANT)] = IGNORE
        out.nats += float(token_losses(model, ids, targets).sum())
        out.tokens += int((targets != IGNORE).sum())
        # An end token counts as one character, as the line break of the play would.
        text = [[t for t in row[1:] if t > ASSISTANT] for row in part]
        out.chars += sum(len(s) for s in tokenizer.decode_batch(text))
        out.chars += sum(row[1:].count(END) for row in part)
    model.train()
    return out


@torch.no_grad()
def loss_by_position(
    model: nn.Module, segments: list[list[str]], encode: Encoder, rotations: int = 8
) -> dict[str, float]:
    """Loss by position in rows of 4096 tokens; each segment is rotated so that its parts come
    at every position."""
    model.eval()
    edges = [0, 512, 1024, 2048, MAX_LEN]
    parts = [Loss() for _ in edges[1:]]
    for segment in segments:
        for rotation in range(rotations):
            at = rotation * len(segment) // rotations
            row: list[int] = []
            for turn, speech in enumerate(segment[at:] + segment[:at]):
                row += [ASSISTANT if turn % 2 else USER, *encode(speech), END]
            ids, targets = batch_of([row[: MAX_LEN + 1]], min(MAX_LEN, len(row) - 1))
            targets[(targets == USER) | (targets == ASSISTANT)] = IGNORE
            losses = token_losses(model, ids, targets)
            for part, low, high in zip(parts, edges, edges[1:], strict=False):
                part.nats += float(losses[:, low:high].sum())
                part.tokens += int((targets[:, low:high] != IGNORE).sum())
    model.train()
    return {
        f"{low}-{high}": round(part.per_token, 3)
        for part, low, high in zip(parts, edges, edges[1:], strict=False)
    }


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.kv_heads,
        head_dim=64,
        max_position_embeddings=MAX_LEN,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(1 / math.sqrt(2 * args.layers))
    return model


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Dropout on the embeddings and on what every block adds; only while training."""

    def hook(module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, rate, module.training)

    model.model.embed_tokens.register_forward_hook(hook)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(hook)
        layer.mlp.down_proj.register_forward_hook(hook)


def make_optimizers(model: nn.Module, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the embedding and the norms."""
    matrices: list[nn.Parameter] = []
    embeddings: list[nn.Parameter] = []
    norms: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        kind = norms if parameter.ndim < 2 else embeddings if "embed" in name else matrices
        kind.append(parameter)
    adam_groups = [
        {"params": embeddings, "weight_decay": args.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(adam_groups, lr=args.lr, betas=(0.9, 0.98)),
        torch.optim.Muon(
            matrices,
            lr=args.lr,
            weight_decay=args.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(
    out: Path, config: LlamaConfig, state: dict[str, torch.Tensor], tokenizer: Tokenizer
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous().clone()
        for name, tensor in state.items()
        if name != "lm_head.weight"
    }
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    write_json(
        out / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_LEN,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": END,
            "pad_token_id": PAD,
        },
    )
    write_json(
        out / "generation_config.json",
        {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD},
    )
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_LEN,
            "clean_up_tokenization_spaces": False,
            "eos_token": SPECIALS[END],
            "pad_token": SPECIALS[PAD],
            "extra_special_tokens": [SPECIALS[USER], SPECIALS[ASSISTANT]],
        },
    )
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="the play, as one text file")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.2)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--ema", type=float, default=0.995, help="decay of the averaged weights")
    parser.add_argument("--cut", type=float, default=0.06, help="share of words cut in two")
    parser.add_argument("--clean-from", type=float, default=0.8, help="when the cutting ends")
    parser.add_argument("--long-from", type=float, default=0.7, help="when long rows come in")
    parser.add_argument("--prose", type=float, default=0.12, help="share of plain-text rows")
    parser.add_argument("--stutter", type=float, default=0.1, help="share of speeches with repeats")
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    turns = parse_turns(args.data.read_text(encoding="utf-8"))
    train, held = split_turns(turns, random.Random(args.seed), parts=5, chars=16000)
    tokenizer = train_tokenizer(train, args.vocab)
    encode = Encoder(tokenizer)
    model = build_model(args)
    add_dropout(model, args.dropout)
    parameters = sum(p.numel() for p in model.parameters())
    sizes = [sum(len(encode(turn)) for part in parts for turn in part) for parts in (train, held)]
    print(
        f"{len(turns)} turns; {sizes[0]} train and {sizes[1]} held-out text tokens; "
        f"{parameters} parameters",
        flush=True,
    )
    optimizers = make_optimizers(model, args)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    best, best_state, best_step = math.inf, dict(average), 0
    running = 0.0
    start = time.perf_counter()

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16)

    def evaluate_average(segments: list[list[str]]) -> Loss:
        current = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.load_state_dict(average, strict=False)
        with autocast():
            loss = evaluate(model, segments, encode, tokenizer)
        model.load_state_dict(current, strict=False)
        return loss

    for step, (ids, targets) in enumerate(batches(train, encode, args), 1):
        warm = min(1.0, step / 100)
        scale = warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * scale
        with autocast():
            losses = token_losses(model, ids, targets)
        loss = losses.sum() / (targets != IGNORE).sum()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        decay = min(args.ema, step / (step + 10))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter, 1 - decay)
        running = loss.item() if step == 1 else 0.98 * running + 0.02 * loss.item()
        if step % 20 == 0:
            seconds = time.perf_counter() - start
            print(f"step {step}/{args.steps}  train {running:.3f}  {seconds:.0f} s", flush=True)
        if step % args.eval_every == 0 or step == args.steps:
            valid = evaluate_average(held)
            print(
                f"  held out: {valid.per_token:.4f} nats/token, {valid.per_char:.4f} nats/char",
                flush=True,
            )
            if valid.per_token < best:
                best, best_step = valid.per_token, step
                best_state = {name: tensor.clone() for name, tensor in average.items()}
                export(args.out, model.config, best_state, tokenizer)

    # The report is about the weights as they are stored: rounded to bfloat16.
    stored = {name: t.to(torch.bfloat16).float() for name, t in best_state.items()}
    model.load_state_dict(stored, strict=False)
    report = {
        "parameters": parameters,
        "bytes": (args.out / "model.safetensors").stat().st_size,
        "best_step": best_step,
        "seconds": round(time.perf_counter() - start),
    }
    for name, segments in (("train", train), ("held_out", held)):
        result = evaluate(model, segments, encode, tokenizer)
        report[f"{name}_nats_per_token"] = round(result.per_token, 4)
        report[f"{name}_nats_per_char"] = round(result.per_char, 4)
    report["held_out_nats_per_token_by_position"] = loss_by_position(model, held, encode)
    print(json.dumps(report, indent=2), flush=True)


if __name__ == "__main__":
    main()
