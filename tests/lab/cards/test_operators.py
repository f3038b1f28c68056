"""Step times from tables of operators: what is between the measured places, and bad tables."""

import json
from pathlib import Path

import pytest

from aioserve.errors import ConfigError
from aioserve.lab.cards.operators import AttentionTable, OperatorTimes
from aioserve.runner.step_times import make_step_times
from aioserve.scheduler.output import StepFeatures
from aioserve.testing.step_times import StepTimesContract

LAYERS = 2
DENSE = {"qkv_proj": 10.0, "o_proj": 5.0, "layernorm": 1.0}  # us of one token; 128 take twice that


def write_tables(folder: Path, *, experts: bool = False, attention: str = "") -> dict[str, object]:
    """Write the tables of a card, and return the options that name them."""
    lines = ["layer,tokens,time_us"]
    for layer, us in DENSE.items():
        lines += [f"{layer},1,{us}", f"{layer},128,{2 * us}"]
    (folder / "card-dense.csv").write_text("\n".join(lines))
    (folder / "card-per_sequence.csv").write_text(
        "layer,sequences,time_us\nlm_head,1,100\nlm_head,256,200\nsampler,1,3\nsampler,256,3\n"
    )
    lines = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    for n in (1, 256):  # rows that decode: 8 us to begin, and 1 us for 1,024 tokens of context
        lines += [f"0,0,{n},{kv},{8 + n * kv / 1024}" for kv in (16, 1024, 16384)]
    for chunk in (16, 1024):
        for before in (0, 4096):
            alone = 8 + chunk * (chunk / 2 + before) / 65536
            lines.append(f"{chunk},{before},0,0,{alone}")
            lines += [
                f"{chunk},{before},{n},{kv},{alone + n * kv / 1024}"
                for n in (1, 256)
                for kv in (16, 16384)
            ]
    (folder / "card-attention.csv").write_text(attention or "\n".join(lines))
    shape: dict[str, int] = {"num_hidden_layers": LAYERS, "hidden_size": 1000}
    if experts:
        shape |= {"num_experts": 8, "num_experts_per_tok": 2}
        rows = [f"{t},{a},{10 * a + t / 10}" for a in (1, 2, 4, 8) for t in (1, 64, 2048)]
        (folder / "card-moe.csv").write_text("\n".join(["tokens,activated_experts,time_us", *rows]))
    (folder / "config.json").write_text(json.dumps(shape))
    return {"tables": str(folder / "card"), "model": str(folder)}


def microseconds(source: object, num_decodes: int, context: int, prefills: object = ()) -> float:
    """Return what the source says of a step."""
    rows = list(prefills)  # type: ignore[call-overload]
    num_context = num_decodes * context + sum(end for _, end in rows)
    features = StepFeatures.of(num_decodes, num_context, rows)
    return 1e6 * source.seconds(features, rows)  # type: ignore[attr-defined]


class TestContract(StepTimesContract):
    @pytest.fixture
    def subject(self, tmp_path: Path):  # type: ignore[no-untyped-def]
        from aioserve.testing.step_times import StepTimesSubject

        return StepTimesSubject.named("operators", write_tables(tmp_path))


def test_a_step_is_the_sum_of_its_operators(tmp_path: Path) -> None:
    source = make_step_times("operators", {**write_tables(tmp_path), "compiled": False})
    # One row: each layer has a projection, another, two norms, and attention of 1,024 tokens.
    assert microseconds(source, 1, 1024) == pytest.approx(LAYERS * (10 + 5 + 2 + 9) + 103)


def test_a_compiler_saves_the_start_of_small_kernels(tmp_path: Path) -> None:
    options = write_tables(tmp_path)
    plain = make_step_times("operators", {**options, "compiled": False})
    compiled = make_step_times("operators", options)
    saved = microseconds(plain, 1, 1024) - microseconds(compiled, 1, 1024)
    assert saved == pytest.approx(LAYERS * 2 * DENSE["layernorm"])


def test_steps_are_padded_to_captured_graphs(tmp_path: Path) -> None:
    options = {**write_tables(tmp_path), "compiled": False}
    padded = make_step_times("operators", options)
    eager = make_step_times("operators", {**options, "graphs": False})
    # 60 rows go through the products as 64, four more of the 127 that double their time.
    more = LAYERS * (10 + 5 + 2) * 4 / 127
    assert microseconds(padded, 60, 16) - microseconds(eager, 60, 16) == pytest.approx(more)


def test_prompts_beside_the_longest_add_what_they_take_alone(tmp_path: Path) -> None:
    source = make_step_times("operators", {**write_tables(tmp_path), "graphs": False})
    prompts = [(512, 512), (512, 512)]
    two = microseconds(source, 0, 0, prompts)
    alone = AttentionTable(tmp_path / "card-attention.csv")
    one = microseconds(source, 0, 0, [(1024, 1024)])  # the same products
    floor = alone(16, 0, 0, 0)
    of_two = 2 * alone(512, 0, 0, 0) - floor
    head = 100 / 255  # one more row for the output head
    assert two - one == pytest.approx(LAYERS * (of_two - alone(1024, 0, 0, 0)) + head)


def test_attention_between_places_is_straight_in_context_and_a_power_of_the_chunk(
    tmp_path: Path,
) -> None:
    write_tables(tmp_path)
    table = AttentionTable(tmp_path / "card-attention.csv")
    assert table(0, 0, 1, 512) == pytest.approx(8 + 512 / 1024)
    assert table(16, 2048, 0, 0) == pytest.approx(8 + 16 * (8 + 2048) / 65536)
    low, high = table(16, 0, 0, 0), table(1024, 0, 0, 0)
    assert table(128, 0, 0, 0) == pytest.approx((low * high) ** 0.5)  # half way by the logarithm


def test_cards_that_share_layers_exchange_what_they_summed(tmp_path: Path) -> None:
    options = {**write_tables(tmp_path), "graphs": False}
    one = make_step_times("operators", options)
    link = {"link_gb_s": 1.0, "link_us": 7.0, "tensor_parallel": 2}
    two = make_step_times("operators", {**options, **link})
    # Two sums a layer, in two phases each, of half of 10 rows of 1,000 values of 2 bytes: 10 us.
    exchanged = microseconds(two, 10, 16) - microseconds(one, 10, 16)
    assert exchanged == pytest.approx(LAYERS * 2 * 2 * (7 + 10))


def test_ranks_that_share_experts_wait_for_the_one_with_the_prompt(tmp_path: Path) -> None:
    options = write_tables(tmp_path, experts=True)
    link = {"link_gb_s": 10.0, "ranks": 2}
    source = make_step_times("operators", {**options, **link})
    both = microseconds(source, 64, 1024)
    with_prompt = microseconds(source, 64, 1024, [(1024, 1024)])
    with_two = microseconds(source, 64, 1024, [(1024, 1024), (1024, 1024)])
    assert both < with_prompt
    # A prompt for the other rank as well: its own kernels cost nothing more.
    assert with_two - with_prompt < (with_prompt - both) / 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tables": "nowhere/card"}, "no operator table nowhere/card-dense.csv"),
        ({"tensor_parallel": 2}, "link_gb_s must say how fast"),
        ({"ranks": 2, "link_gb_s": 1.0}, "ranks share experts, and this model has none"),
        ({"speed": 2}, "unknown field `speed`"),
    ],
)
def test_options_that_cannot_be_are_refused(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_step_times("operators", {**write_tables(tmp_path), **change})


def test_a_table_may_quote_its_header_and_lack_what_is_not_used_in_a_row(tmp_path: Path) -> None:
    options = write_tables(tmp_path)
    plain = make_step_times("operators", options)
    path = tmp_path / "card-dense.csv"
    path.write_text(
        path.read_text().replace("layer,tokens,time_us", '"layer","tokens",time_us,note')
    )
    assert microseconds(make_step_times("operators", options), 1, 64) == microseconds(plain, 1, 64)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("dense", "layer,tokens\nqkv_proj,1\n", "lacks time_us"),
        ("dense", "layer,tokens,time_us\n", "has no lines"),
        ("dense", "layer,tokens,time_us\nqkv_proj,one,2\n", r"card-dense.csv:2: .*tokens"),
        ("dense", "layer,tokens,time_us\nqkv_proj,1,-2\n", r"card-dense.csv:2: .*time_us"),
        ("dense", "layer,tokens,time_us\nmagic,1,2\n", "unknown layer magic; known: act_fn"),
        ("dense", "layer,tokens,time_us\nqkv_proj,1,2\n", "lack the layer o_proj"),
        ("dense", "layer,tokens,time_us\no_proj,1,2\no_proj,1,3\n", "o_proj has two times"),
        (
            "attention",
            "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n16,0,0,0,8\n",
            "has no decodes without a prompt",
        ),
    ],
)
def test_a_bad_table_is_named_in_one_sentence(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    options = write_tables(tmp_path)
    (tmp_path / f"card-{name}.csv").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        OperatorTimes.from_options(options)
    assert "\n" not in str(caught.value)
