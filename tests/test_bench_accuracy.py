"""`python -m echo_pg bench accuracy` on a tiny random model, and the arithmetic of its scores."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny_model
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_model import LAYERS, WORDS
from torch import Tensor
from torch.nn import functional as F

from echo_pg.__main__ import main
from echo_pg.bench import accuracy, accuracy_results, accuracy_rows, results, scoring
from echo_pg.bench.accuracy_rows import PLAIN, REFERENCE, ROWS, Row

OFF = Row("switched off", {"policy": "off"})


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets this for its ranks; here it would reach those of later tests."""
    monkeypatch.setenv("ECHO_LOG", "off")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and two texts."""
    model, text = tiny_model.save(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("text")
    for name, words in (("one", "the quick brown fox "), ("two", "jumps over a lazy dog, ")):
        (text / f"{name}.txt").write_text(words * 40)
    return model, text


def plan_of(folders: tuple[Path, Path], out: Path, *rows: Row, **changes: Any) -> dict[str, Any]:
    model, text = folders
    return {
        "device": "cpu", "text": str(text), "texts": ("one", "two"), "model": str(model), "rows": rows, "tokens": 96,
        "length": 32, "batch": 2, "prompts": 3, "prompt_tokens": 8, "new_tokens": 5, "greedy": {REFERENCE, PLAIN},
        "growth": True, "fabric": "auto", "dtype": "bfloat16", "commit": "", "path": str(out / "accuracy-cpu.jsonl"),
    } | changes  # fmt: skip


def rows_named(*names: str) -> list[Row]:
    return [next(row for row in ROWS if row.name == name) for name in names]


def test_from_end_to_end_and_again(
    folders: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reference, plain, default, shipped = rows_named(
        REFERENCE, PLAIN, "4-bit default", "4-bit default, min_bytes as shipped"
    )
    assert accuracy.run(plan_of(folders, tmp_path, reference, plain, default, OFF), (2,)) == 0, capfd.readouterr()
    path = tmp_path / "accuracy-cpu.jsonl"
    made = {(record["row"], record["part"]): record for record in results.read(path, "accuracy")}
    scores = {row: record for (row, part), record in made.items() if part == "scores"}
    assert set(scores) == {REFERENCE, PLAIN, "4-bit default", "switched off"}
    for text in ("one", "two"):
        exact, off = scores[REFERENCE]["scores"][text], scores["switched off"]["scores"][text]
        assert exact["kl"] is None and len(exact["nll"]) == 3
        assert off["nll"] == exact["nll"] and (off["kl"], off["same_top"]) == (0.0, 1.0)
        assert all(scores[row]["scores"][text]["kl"] > 0.001 for row in (PLAIN, "4-bit default"))
        assert exact["perplexity"] == pytest.approx(math.exp(sum(exact["nll"]) / 96), rel=1e-6)  # nll has 6 decimals
    # Two windows and then one, of each text, make four passes over two sites a layer.
    assert scores[PLAIN]["calls_quantized"] == 4 * 2 * LAYERS and scores[REFERENCE]["calls_quantized"] == 0
    said = made[PLAIN, "greedy"]
    assert said["forwards"] == 5 and said["calls_quantized"] == 5 * 2 * LAYERS
    assert made[REFERENCE, "greedy"]["greedy"]["same_tokens"] == 1.0 and 0.0 < said["greedy"]["same_tokens"] < 1.0
    growth = made["growth: group", "growth"]["sites"]
    assert len(growth) == 2 * LAYERS and growth[0]["sent_rms"] == growth[0]["x_rms"] and growth[2]["sent_rms"] > 0
    options = scores[PLAIN]["options"]
    assert options["min_bytes"] == 0 and options["feedback"] is False and options["eta"] == 0.75
    assert scores[PLAIN]["texts"]["one"]["sha256"] != scores[PLAIN]["texts"]["two"]["sha256"]
    assert {"device_name", "torch", "transformers", "commit", "seed", "ranks"} <= scores[PLAIN].keys()
    told = capfd.readouterr().out
    assert "2 ranks" in told and PLAIN in told and "switched off" in told and "growth: group" in told

    before = path.read_text()
    again = plan_of(folders, tmp_path, reference, plain, shipped)
    assert accuracy.run(again, (2,)) == 0, capfd.readouterr()
    added = path.read_text().removeprefix(before).splitlines()
    assert path.read_text().startswith(before) and len(added) == 1
    record = json.loads(added[0])
    assert record["row"] == shipped.name and record["calls_quantized"] == 0, "tensors below min_bytes stay exact"
    assert record["scores"]["one"]["kl"] == 0.0


def score_in_parts(rank: int, size: int, tokens: int) -> scoring.Scores:
    windows, hidden, reference, weight = scoring_case(tokens)
    share = len(weight) // size

    class Head:
        pass

    model: Any = Head()
    model.lm_head, model.config = Head(), Head()
    model.lm_head.weight, model.config.vocab_size = weight[rank * share : (rank + 1) * share], len(weight)
    return scoring.score(model, windows, hidden, reference)


def scoring_case(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(WORDS, (3, tokens + 1), generator=generator)
    hidden, change = (torch.randn(3 * tokens, 32, generator=generator) for _ in range(2))
    return windows, hidden, hidden + 0.3 * change, torch.randn(WORDS, 32, generator=generator)


@pytest.mark.parametrize("size", [2, 4])
def test_scores_are_those_of_whole_logits(size: int) -> None:
    tokens = 200  # more than one chunk of 512 in all
    windows, hidden, reference, weight = scoring_case(tokens)
    logits, expected = (F.linear(h, weight).double() for h in (hidden, reference))
    nll = F.cross_entropy(logits, windows[:, 1:].flatten(), reduction="none").view(3, -1).sum(1)
    kl = F.kl_div(logits.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
    # fp32 sums of 256 terms, and products of 32: relative errors below 256 * 2^-24 of values up to some 10 nats.
    bound = 10 * WORDS * 2.0**-24
    for found in run_ranks(score_in_parts, size, tokens):
        assert found.tokens == 3 * tokens and found.kl == pytest.approx(float(kl), abs=bound)
        assert torch.tensor(found.nll) == pytest.approx(nll.float(), abs=bound * tokens)
        assert found.same_top == float((logits.argmax(-1) == expected.argmax(-1)).double().mean())


def generate_both_ways(rank: int, size: int, folder: str) -> tuple[list[list[int]], list[list[int]]]:
    from echo_pg import options
    from echo_pg.bench import smollm2

    options.tell_frameworks(rank, size, None)
    model = smollm2.load_model(Path(folder), torch.bfloat16)
    model.generation_config.eos_token_id = None
    prompts = torch.arange(40, 64).view(3, 8)
    theirs = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=6, do_sample=False)
    return scoring.continuations(model, prompts, 6).tolist(), theirs[:, 8:].tolist()


def test_continuations_are_those_of_generate(folders: tuple[Path, Path]) -> None:
    for ours, theirs in run_ranks(generate_both_ways, 2, str(folders[0]), timeout=120):
        assert ours == theirs


def follow(rank: int, size: int, eta: float) -> list[tuple[float, float, float]]:
    """Per site: norm of delta as diagnostics have it, and as the followed x' has it; growth of x'."""
    import data

    import echo_pg
    from echo_pg.bench.growth import GroupFollower

    chosen = echo_pg.Options.paper(policy="all", min_bytes=0, diagnostics=True, eta=eta)
    group = dist.new_group(backend="echo", pg_options=chosen)
    follower = GroupFollower(chosen, size, torch.bfloat16)
    echo_pg.new_pass("forward", group)
    found = []
    for site in range(6):
        tensor = data.contributions("activations", size, 4000, torch.bfloat16, site=0)[rank] * (1 + site / 8)
        x = tensor.float()
        dist.all_reduce(tensor, group=group)
        sent = follower.next(x, tensor.float())
        total = sent.double()
        dist.all_reduce(total)
        measured = echo_pg.stats(group)["diagnostics"]["forward"][-1]["delta_l2"]
        found.append((measured, float((tensor.double() - total).norm()), float(sent.norm() / x.norm())))
    return found


def test_followed_contributions_are_those_that_were_sent() -> None:
    for found in run_ranks(follow, 2, 1.0):
        # x' is rounded to fp32 once by the follower; delta is about 1/30 of it, so the norms agree to 30 * 2^-24.
        for measured, followed, _ in found:
            assert followed == pytest.approx(measured, rel=30 * 2.0**-24)
        assert found[0][2] == 1.0 and found[-1][2] > 1.2, "contributions that resemble each other pile up"


def test_the_share_of_the_gap() -> None:
    exact, plain = [100.0, 102.0, 98.0, 101.0], [140.0, 141.0, 139.0, 142.0]

    def perplexity(nll: list[float]) -> float:
        return math.exp(sum(nll) / 200)

    half = [math.log((math.exp(x / 50) + math.exp(y / 50)) / 2) * 50 for x, y in zip(exact, plain, strict=True)]
    expected = (perplexity(plain) - perplexity(half)) / (perplexity(plain) - perplexity(exact))
    share, error = accuracy_results.gap_closed(half, plain, exact, 200)
    assert share == pytest.approx(expected) and 0.4 < share < 0.6 and 0 < error < 0.1
    assert accuracy_results.gap_closed(exact, plain, exact, 200) == (1.0, 0.0)
    assert accuracy_results.gap_closed(plain, plain, exact, 200) == (0.0, 0.0)
    assert math.isnan(accuracy_results.gap_closed(half, [101.0, 101.0, 99.0, 100.5], exact, 200)[0]), "no gap"


def test_agreement_of_continuations() -> None:
    reference = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    made = torch.tensor([[1, 2, 9, 4], [5, 6, 7, 8]])
    assert scoring.agreement(made, reference) == {"same_tokens": 7 / 8, "same_prefix": 3.0}


def test_rows_are_distinct_and_what_their_sets_need_comes_first() -> None:
    from echo_pg import Options

    assert len({row.name for row in ROWS}) == len({repr(Options(**row.settings())) for row in ROWS}) == len(ROWS)
    chosen = [row.name for row in accuracy_rows.choose("paper 4-bit eta*", None)]
    assert chosen[:2] == [REFERENCE, "paper 4-bit no feedback"] and len(chosen) == 5
    assert all(row.plain in {"", *(other.name for other in ROWS)} for row in ROWS)
    for row in accuracy_rows.choose(None, "paper-table8"):
        if row.paper:
            assert Options(**row.settings()).scale_dtype == "float16"
            assert Options(**row.settings()).residual == "group"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--text"),
        (["--text", "nowhere"], "nowhere"),
        (["--rows", "no such"], "no such"),
        (["--set", "other"], "other"),
        (["--text", ".", "--tokens", "-1"], "--tokens"),
        (["--text", ".", "--ranks", "1"], "--ranks"),
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "accuracy", *arguments]) == 2
    assert said in capsys.readouterr().err
