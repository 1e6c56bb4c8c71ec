"""The kernels' test at a first start: what passes, what it finds, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphs import selftest
from graphs.selftest import OPERATORS, SelfTestError, Sizes, check_operators, self_test
from ops.delta_rule import DeltaSizes
from ops.gdn_conv import ConvSizes
from ops.kernels.attention import launch_attention
from ops.kernels.attention_prepare import launch_attention_prepare
from ops.kernels.delta_rule import launch_delta_rule
from ops.kernels.gdn_conv import launch_gdn_conv
from ops.kernels.rows import (
    launch_add_rms_norm,
    launch_add_rows,
    launch_gated_rms_norm,
    launch_silu_mul,
    launch_take_rows,
)

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SMALL = Sizes(
    hidden=64, key_heads=1, value_heads=2, delta_head=16, heads=2, attention_head=32, rotary=8, lengths=(70, 3, 60)
)


def gdn_conv(proj: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, tables: Tensor, *kept: Tensor) -> Any:
    sizes = ConvSizes.of(proj, conv, a_log, *kept[1:])
    return launch_gdn_conv(proj, conv, a_log, dt_bias, tables, *kept, sizes)


def delta_rule(*arguments: Tensor) -> Tensor:
    return launch_delta_rule(*arguments, DeltaSizes.of(arguments[3], arguments[4]))


LAUNCHES: dict[str, Callable[..., Any]] = {
    "take_rows": launch_take_rows,
    "add_rms_norm": launch_add_rms_norm,
    "gdn_conv": gdn_conv,
    "delta_rule": delta_rule,
    "gated_rms_norm": launch_gated_rms_norm,
    "attention_prepare": launch_attention_prepare,
    "attention": launch_attention,
    "silu_mul": launch_silu_mul,
    "add_rows": launch_add_rows,
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU")
@pytest.mark.parametrize("name", OPERATORS)
def test_every_kernel_passes_in_the_interpreter(name: str) -> None:
    worst = check_operators(CPU, torch.float32, sizes=SMALL, operators={name: LAUNCHES[name]})
    assert worst.keys() == {name}


@DTYPES
def test_the_cpu_kernels_equal_themselves(dtype: torch.dtype) -> None:
    """Which they do bit for bit, so that the two passes and their data are right."""
    assert check_operators(CPU, dtype) == dict.fromkeys(OPERATORS, 0.0)


def changed(result: Any, change: Callable[[Tensor], None]) -> Any:
    """The results of an operator with the first of them changed in place."""
    change(result if isinstance(result, Tensor) else result[0])
    return result


class TestControls:
    """What a broken compiler would leave, in each operator in turn."""

    @DTYPES
    @pytest.mark.parametrize("name", OPERATORS)
    def test_one_value_of_another_size_is_found(self, name: str, dtype: torch.dtype) -> None:
        def broken(*arguments: Any) -> Any:
            def change(out: Tensor) -> None:
                out[-1, -1] += out[-1].abs().max() * 0.3 + 0.1

            return changed(OPERATORS[name](*arguments), change)

        with pytest.raises(SelfTestError, match=rf"^{name} is off by \d"):
            check_operators(CPU, dtype, sizes=SMALL, operators={name: broken})

    @pytest.mark.parametrize("name", OPERATORS)
    def test_a_value_that_is_not_finite_is_found(self, name: str) -> None:
        def broken(*arguments: Any) -> Any:
            return changed(OPERATORS[name](*arguments), lambda out: out[3].fill_(float("nan")))

        with pytest.raises(SelfTestError, match=f"^{name} is off by inf"):
            check_operators(CPU, torch.float32, sizes=SMALL, operators={name: broken})

    @DTYPES
    @pytest.mark.parametrize("name", OPERATORS)
    def test_one_bit_that_depends_on_the_neighbours_is_found(self, name: str, dtype: torch.dtype) -> None:
        def broken(*arguments: Any) -> Any:
            def change(out: Tensor) -> None:
                if len(out) == sum(SMALL.lengths):
                    words = out.view(torch.int32 if dtype == torch.float32 else torch.int16)
                    words[-1, -1] ^= 1

            return changed(OPERATORS[name](*arguments), change)

        with pytest.raises(SelfTestError, match=f"^{name} gives the rows of a segment other bits"):
            check_operators(CPU, dtype, sizes=SMALL, operators={name: broken})

    @pytest.mark.parametrize(
        ("name", "written"), [("gdn_conv", 5), ("gdn_conv", 6), ("gdn_conv", 7), ("delta_rule", 4)]
    )
    def test_what_an_operator_leaves_behind_counts_too(self, name: str, written: int) -> None:
        def broken(*arguments: Any) -> Any:
            result = OPERATORS[name](*arguments)
            arguments[written][0, -1].zero_()
            arguments[written][0, 0].zero_()
            return result

        with pytest.raises(SelfTestError, match=f"^{name} "):
            check_operators(CPU, torch.float32, sizes=SMALL, operators={name: broken})


class TestRecord:
    @pytest.fixture
    def runs(self, monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
        ran: list[torch.dtype] = []

        def check(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
            ran.append(dtype)
            return {"attention": 0.25}

        monkeypatch.setattr(selftest, "check_operators", check)
        monkeypatch.setattr(selftest, "driver_version", lambda: "1.2")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU 1")
        monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
        return ran

    @staticmethod
    def start(folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self_test(torch.device("cuda", 0), folder, dtype=dtype)

    def test_what_passed_is_kept_and_not_run_again(self, runs: list[torch.dtype], tmp_path: Path) -> None:
        self.start(tmp_path)
        self.start(tmp_path)
        assert runs == [torch.bfloat16]
        (file,) = (tmp_path / "selftest").iterdir()
        kept = json.loads(file.read_text())
        assert kept["worst"] == {"attention": 0.25}
        assert kept["versions"].keys() == {"gpu", "driver", "torch", "triton", "sources", "dtype"}
        self.start(tmp_path, torch.float32)
        assert runs == [torch.bfloat16, torch.float32]

    @pytest.mark.parametrize(
        ("place", "value"),
        [("driver_version", lambda: "1.3"), ("sources_hash", lambda names: "0"), ("triton.__version__", "4.0")],
    )
    def test_another_version_runs_it_again(
        self, runs: list[torch.dtype], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, value: Any
    ) -> None:
        self.start(tmp_path)
        monkeypatch.setattr(place if "." in place else f"graphs.selftest.{place}", value)
        self.start(tmp_path)
        assert len(runs) == 2

    def test_the_sources_are_those_of_every_operator(self) -> None:
        assert {"ops/attention.py", "ops/kernels/attention.py", "ops/tables.py"} <= set(selftest._sources())

    def test_a_damaged_record_is_made_again(self, runs: list[torch.dtype], tmp_path: Path) -> None:
        for text in ("{", "[]", "{}"):
            self.start(tmp_path)
            (file,) = (tmp_path / "selftest").iterdir()
            file.write_text(text)
        self.start(tmp_path)
        assert len(runs) == 4

    def test_a_record_that_cannot_be_kept_is_one_line_with_the_remedy(
        self, runs: list[torch.dtype], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "selftest").write_text("a file where a folder should be")
        self.start(tmp_path)
        (line,) = caplog.messages
        assert "cannot be written" in line
        assert line.endswith("name another folder with cache_dir")

    def test_a_failure_names_operator_error_and_versions_and_leaves_no_record(
        self, runs: list[torch.dtype], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def check(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
            raise SelfTestError("attention is off by 12 times what is tolerated")

        monkeypatch.setattr(selftest, "check_operators", check)
        named = rf"attention is off by 12 .* \(GPU 1, driver 1\.2, torch {torch.__version__.split('+')[0]}.*triton .*\)"
        with pytest.raises(SelfTestError, match=named):
            self.start(tmp_path)
        assert not (tmp_path / "selftest").exists()


@pytest.mark.gpu
@DTYPES
def test_this_gpu_and_compiler_pass(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    self_test(device, tmp_path, dtype=dtype)
    (file,) = (tmp_path / "selftest").iterdir()
    worst = json.loads(file.read_text())["worst"]
    print(json.dumps(worst))
    assert worst.keys() == OPERATORS.keys()
    assert max(worst.values()) > 0, "the kernels were not run: no CPU kernel has all of their bits"

    def nobody(*_: object) -> None:
        raise AssertionError("operators were run")

    monkeypatch.setattr(selftest, "check_operators", nobody)
    self_test(device, tmp_path, dtype=dtype)
