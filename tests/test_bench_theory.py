"""`python -m echo_pg bench theory`: the paper's constants, bounds that can break, and a run on synthetic sequences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from echo_pg import Options
from echo_pg.__main__ import main
from echo_pg.bench import results, theory, theory_rank, theory_report

PAPER = {"a": 0.35, "beta1": 0.7, "beta2": 0.3, "eta": 0.75, "feedback": True, "rotation": "none"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets this for its ranks; here it would reach those of later tests."""
    monkeypatch.setenv("ECHO_LOG", "off")


def record(delta: list[float], partial: list[float], **options: Any) -> dict[str, Any]:
    both = {"delta_l2": delta, "delta_max": delta, "partial_l2": partial, "partial_max": partial}
    return {
        "part": "fresh",
        "row": "local",
        "ranks": 2,
        "options": PAPER | options,
        "sites_measured": len(delta),
        **both,
    }


def test_constants_are_those_of_the_paper() -> None:
    one = record([1.0], [1.0], eta=1.0)
    assert theory_report.mean_age(one) == pytest.approx(1.095, abs=5e-4)
    assert theory_report.bound(one, 56) == pytest.approx(2.095, abs=5e-4)
    # tau_2 is about 1.3; at eta 0.75 and 56 sites the variance is about 5 q^2.
    assert theory_report.white(one, 200) ** 2 == pytest.approx(1.3, abs=0.05)
    assert theory_report.white(record([1.0], [1.0]), 56) ** 2 == pytest.approx(5, abs=0.3)
    assert theory_report.bound(record([1.0], [1.0]), 56) == pytest.approx(0.25 * 56 + 0.75 * 2.095, abs=1e-3)
    plain = record([1.0], [1.0], feedback=False)
    assert theory_report.bound(plain, 56) == 56 and theory_report.white(plain, 49) == pytest.approx(7)
    assert sum(theory_report.weights(one, 200)) == pytest.approx(1)


def test_a_sum_above_its_bound_is_shown() -> None:
    fits, breaks = record([1.0, 0.5], [1.0, 1.5]), record([1.0, 0.5], [1.0, 2.2])
    assert not theory_report.exceeds(fits) and theory_report.exceeds(breaks)
    said = theory_report.source_table([fits, breaks], "fresh").splitlines()
    assert "EXCEEDS" not in said[3] and said[4].endswith("EXCEEDS THE BOUND")


def test_the_row_that_is_named_as_shipped_is_so() -> None:
    made = Options(**(theory._COMMON | theory.ROWS["rot-one"]))
    assert made == Options(**theory._QUANTIZED)


def test_gradients_go_through_a_norm_as_autograd_takes_them() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(16, eps=1e-5).double()
    torch.nn.init.normal_(norm.weight)
    x, gradient = torch.randn(2, 3, 16).double().requires_grad_(), torch.randn(2, 3, 16).double()
    (0.0 + norm.weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).backward(gradient)
    assert torch.allclose(theory_rank.through_norm(gradient, norm, x.detach()), x.grad, rtol=1e-12, atol=1e-12)


def test_synthetic_sequences_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "theory", "--sites", "12", "--numel", "4096", "--out", str(tmp_path)]
    assert main(arguments) == 0, capfd.readouterr()
    path = tmp_path / "theory-cpu.jsonl"
    made = {(r["part"], r["row"]): r for r in results.read(path, "theory")}
    assert len(made) == len(theory.SEQUENCES) * len(theory.ROWS)
    assert not any(map(theory_report.exceeds, made.values()))
    alike = {row: max(made["same", row]["partial_l2"]) for row in theory.ROWS}
    # The same error twelve times over without feedback; with it, no more than the bound for its own largest error.
    assert alike["plain"] == pytest.approx(12 * made["same", "plain"]["delta_l2"][0], rel=1e-4)
    assert alike["local-eta1"] < 0.4 * alike["plain"] and alike["group-eta1"] < alike["plain"]
    assert alike["local-eta1"] < alike["local"]
    # `group` carries more than errors, so that its steps grow.
    growth = {row: max(made["same", row]["delta_l2"]) / max(made["same", "plain"]["delta_l2"]) for row in theory.ROWS}
    assert growth["group-eta1"] > 1.5 > growth["local"]
    assert main(arguments) == 0 and len(path.read_text().splitlines()) == len(made)  # nothing twice
    said = capfd.readouterr().out
    assert "rotation, local" in said and "EXCEEDS" not in said
    assert (tmp_path / "theory-cpu-source.png").stat().st_size > 10_000


def of_a_real_model(rank: int, size: int, folder: str, text: str) -> dict[str, Any]:
    import echo_pg

    plan = {"model": folder, "text": text, "tokens": 48}
    real = theory_rank.RealModel(plan, rank, size)
    found = {}
    for row in ("plain", "local"):
        group = torch.distributed.new_group(
            backend="echo", group_desc="tp", pg_options=echo_pg.Options(**(theory._COMMON | theory.ROWS[row]))
        )
        found["forward", row], found["backward", row] = real.forward(group), real.backward(group)
    return found


def test_a_model_forward_and_backward(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bytes_ = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=bytes_, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "prose-tune.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    found, other = run_ranks(of_a_real_model, 2, str(tmp_path), str(tmp_path), env={"ECHO_LOG": "off"})
    assert found == other
    for (part, row), measured in found.items():
        assert measured["sites_measured"] == len(measured["partial_l2"]) == 6
        assert len(measured["sigma2"]) == len(measured["energy"]) == 7 and measured["energy"][0] == 0
        assert all(0 < value < 0.5 and math.isfinite(value) for value in measured["energy"][1:])
        whole = measured | {"options": PAPER | {"feedback": row != "plain"}}
        assert not theory_report.exceeds(whole)
        if part == "backward":
            assert len(measured["stream_l2"]) == 6 and min(measured["stream_l2"]) > 0
    # The first site has met no correction yet.
    assert found["forward", "plain"]["delta_l2"][0] == found["forward", "local"]["delta_l2"][0]


@pytest.mark.parametrize("bad", [["--rows", "best"], ["--ranks", "1"], ["--sites", "1"]])
def test_arguments_that_make_no_sense(bad: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "theory", *bad, "--out", str(tmp_path)]) == 2
    assert bad[0] in capsys.readouterr().err
