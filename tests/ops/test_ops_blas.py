"""Which cuBLASLt algorithms are taken, and from which library, told by a library of the test's making."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ops import blas

MAPS = """\
55d0-55d1 r--p 00000000 08:01 11 /usr/bin/python3.12
7f00-7f01 r--p 00000000 08:01 12 {a}
7f01-7f02 r-xp 00001000 08:01 12 {a}
7f03-7f04 rw-p 00000000 00:00 0
7f05-7f06 r--p 00000000 08:01 13 {b}
7ffd-7ffe rw-p 00000000 00:00 0  [stack]
"""
OURS = "/site/nvidia/cu13/lib/libcublasLt.so.13"


class FakeLibrary:
    """Answers every question about algorithms with `offers`: (state, split K, reduction scheme) each."""

    def __init__(self, *offers: tuple[int, int, int], status: int = 0, silent: bool = False) -> None:
        self.offers, self.status, self.silent = offers, status, silent
        self.asked = 0
        self.settings: dict[int, int] = {}
        self.destroyed = 0

    def cublasLtMatmulPreferenceCreate(self, preference: Any) -> int:  # noqa: N802
        return 0

    def cublasLtMatmulPreferenceSetAttribute(self, _: Any, attribute: int, value: Any, size: int) -> int:  # noqa: N802
        assert size == ctypes.sizeof(value._obj)
        self.settings[attribute] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, preference: Any) -> int:  # noqa: N802
        self.destroyed += 1
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:  # noqa: N802
        *_, count, found, returned = arguments
        self.asked += 1
        for i, (state, split, reduction) in enumerate(self.offers[:count]):
            found[i].state, found[i].workspace = state, 100 + i
            found[i].algorithm.data[0], found[i].algorithm.data[1] = split, reduction
            found[i].algorithm.data[2] = i + 1
        returned._obj.value = len(self.offers[:count])
        return self.status

    def cublasLtMatmulAlgoConfigGetAttribute(  # noqa: N802
        self, algorithm: Any, attribute: int, value: Any, size: int, written: Any
    ) -> int:
        value._obj.value = algorithm._obj.data[{2: 0, 3: 1}[attribute]]
        return 15 if self.silent else 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(library: FakeLibrary) -> FakeLibrary:
        monkeypatch.setattr(blas, "_lt", lambda: library)
        monkeypatch.setattr(blas, "_problem", lambda *sizes: mock.Mock())
        monkeypatch.setattr(blas, "_handle", lambda device: None)
        monkeypatch.setattr(blas, "_choice", blas._once(blas._choice.__wrapped__))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        return library

    return use


class TestAlgorithms:
    def test_the_first_that_neither_splits_nor_reduces_is_chosen(self, library: Any) -> None:
        fake = library(FakeLibrary((0, 4, 2), (0, 1, 2), (7, 1, 0), (0, 1, 0), (0, 0, 0)))
        assert blas._choice(0, 512, 128, 64).algorithm.data[2] == 4
        assert blas._choice(0, 512, 128, 64).workspace == 103
        assert fake.settings == {1: blas.WORKSPACE_BYTES, 3: 0}
        assert (fake.asked, fake.destroyed) == (1, 1)
        blas._choice(1, 512, 128, 64)
        blas._choice(0, 512, 128, 72)
        assert fake.asked == 3

    @pytest.mark.parametrize("fake", [FakeLibrary((0, 2, 1), (0, 8, 4)), FakeLibrary(), FakeLibrary(status=15)])
    def test_none_that_does_is_an_error_with_the_sizes(self, library: Any, fake: FakeLibrary) -> None:
        library(fake)
        with pytest.raises(RuntimeError, match="no algorithm without split K for 64 rows of a 512x128 weight"):
            blas._choice(0, 512, 128, 64)
        assert blas.codes(512, 128, 64, 8) == []

    def test_an_algorithm_without_such_settings_cannot_split(self, library: Any) -> None:
        library(FakeLibrary((0, 4, 2), silent=True))
        assert blas._choice(0, 512, 128, 64).algorithm.data[2] == 1

    def test_another_status_is_an_error_and_leaks_nothing(self, library: Any) -> None:
        fake = library(FakeLibrary(status=14))
        with pytest.raises(RuntimeError, match="cublasLtMatmulAlgoGetHeuristic returned status 14"):
            blas.codes(512, 128, 64, 8)
        assert fake.destroyed == 1

    def test_codes_ask_for_no_workspace_and_name_the_algorithm(self, library: Any) -> None:
        fake = library(FakeLibrary((0, 2, 1), (0, 1, 0)))
        (code,) = blas.codes(512, 128, 64, 8)
        assert fake.settings[1] == 0
        assert bytes.fromhex(code).ljust(24, b"\0") == b"".join(v.to_bytes(8, "little") for v in (1, 0, 2))


class TestLibrary:
    @pytest.fixture(autouse=True)
    def _cuda_13(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    @staticmethod
    def loaded(tmp_path: Path, other: str) -> list[str]:
        (tmp_path / "maps").write_text(MAPS.format(a=OURS, b=other))
        return blas._loaded("libcublasLt.so.13", tmp_path / "maps")

    def test_a_file_counts_once_and_other_libraries_do_not(self, tmp_path: Path) -> None:
        for other in ("/site/lib/libcublas.so.13", "/site/lib/libcublasLt.so.12", "/site/lib/libcublasLt.so.130"):
            assert self.loaded(tmp_path, other) == [OURS]

    def test_a_second_one_of_the_same_name_is_found(self, tmp_path: Path) -> None:
        for other in ("/usr/my cuda/libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13.1.0.3"):
            assert self.loaded(tmp_path, other) == sorted([OURS, other])

    def test_two_are_an_error_that_names_both_with_the_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blas, "_loaded", lambda name: [OURS, "/usr/lib/libcublasLt.so.13"])
        with pytest.raises(OSError, match=rf"more than once, from {OURS} and /usr/lib/.*leave one.*LD_LIBRARY_PATH"):
            blas._lt.__wrapped__()

    def test_one_that_torch_has_not_loaded_is_not_searched_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blas, "_loaded", lambda name: [])
        monkeypatch.setattr(torch.version, "cuda", "99.1")  # the library of another version may well be there
        with pytest.raises(OSError, match=r"torch has not loaded libcublasLt\.so\.99"):
            blas._lt.__wrapped__()


class TestKept:
    def test_threads_that_ask_together_share_one_value(self) -> None:
        made: list[int] = []
        together = threading.Barrier(8)

        @blas._once
        def make(number: int) -> object:
            made.append(number)
            time.sleep(0.01)
            return object()

        def ask(number: int) -> object:
            together.wait()
            return make(number)

        with ThreadPoolExecutor(8) as pool:
            values = list(pool.map(ask, [1, 2] * 4))
        assert sorted(made) == [1, 2]
        assert len(set(map(id, values))) == 2

    def test_what_fails_is_asked_for_again(self) -> None:
        answers = iter([RuntimeError("out of memory"), None])

        @blas._once
        def make() -> str:
            if error := next(answers):
                raise error
            return "made"

        with pytest.raises(RuntimeError):
            make()
        assert make() == make() == "made"

    def test_a_workspace_is_not_made_while_capturing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="cannot be made while capturing; run it once on this stream before"):
            blas._workspace(0, 7)
