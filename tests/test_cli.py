"""The command lines: clean output, whole files, one line for a mistake, and runs that go on where they stopped."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from engine import cli
from engine.config import EngineConfig, ExplainConfig, ScoreConfig
from engine.errors import ConfigError, InferenceError, RequestError
from engine.explain import explain
from engine.score import score

ROOT = Path(__file__).parents[1]
REQUEST = b'{"state": "s", "questions": {"q": {"type": "noul", "instructions": "i"}}}'


class FakeResponse:
    def __init__(self, body: bytes) -> None:
        self.body = body

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": "fake",
            "answers": {
                "colour": {"type": "choice", "choice": "red", "probabilities": {"red": 0.75, "blue": 0.25},
                           "confidence": 0.5},
                "sure": {"type": "noul", "noul": 0.125},
                "level": {"type": "score", "score": 1.5, "probabilities": {"0": 0.0, "1": 0.5, "2": 0.5},
                          "confidence": 0.25, "legend": {}},
            },
            "usage": {"input_tokens": 1234, "output_tokens": 0},
            "metadata": {"inference_seconds": 0.5, "prefix_cache": {"reused_input_tokens": 1000}, "weights": "random",
                         "body": self.body.decode()},
        }  # fmt: skip


class FakeEngine:
    """Answers any line; `bad`, `broken` and `stop` do what they say. Knows whether it was closed."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.configs: list[EngineConfig] = []
        self.open = 0

    def load(self, config: EngineConfig) -> FakeEngine:
        self.configs.append(config)
        return self

    def __enter__(self) -> FakeEngine:
        self.open += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.open -= 1

    def score(self, body: bytes) -> FakeResponse:
        if body == b"stop":
            raise KeyboardInterrupt
        if body == b"bad":
            raise RequestError("state must be text", field="state", value=3)
        if body == b"broken":
            raise InferenceError("not finite")
        self.seen.append(body)
        return FakeResponse(body)


class Run:
    """One call of `score` with streams of its own."""

    def __init__(self, engine: FakeEngine, stdin: bytes = b"", **options: Any) -> None:
        out, err = io.StringIO(), io.StringIO()
        try:
            config = ScoreConfig(device="cpu", **options)
            self.code = score(config, load=engine.load, stdin=io.BytesIO(stdin), stdout=out, stderr=err)  # type: ignore
        finally:
            self.out, self.err = out.getvalue(), err.getvalue()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_the_example_is_scored_and_named_when_no_request_is_given(engine: FakeEngine) -> None:
    run = Run(engine)
    assert run.code == 0
    assert engine.seen == [(ROOT / cli.EXAMPLE).read_bytes()]
    assert cli.EXAMPLE in run.err
    assert engine.open == 0


def test_json_goes_to_stdout_and_the_table_to_stderr(engine: FakeEngine) -> None:
    run = Run(engine, REQUEST, request="-")
    assert json.loads(run.out) == FakeResponse(REQUEST).to_dict()
    for cells in (["colour", "choice", "red", "0.500"], ["sure", "noul", "yes with 0.125"], ["level", "1.50 of 2"]):
        assert any(all(cell in line for cell in cells) for line in run.err.splitlines()), cells
    assert "1,234 tokens, 1,000 of them reused, 500 ms" in run.err
    assert "The weights are random" in run.err


def test_markup_in_names_is_shown_as_it_is(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    response = FakeResponse(REQUEST).to_dict()
    response["answers"] = {"[red]x[/nope]": {"type": "noul", "noul": 0.5}}
    monkeypatch.setattr(FakeResponse, "to_dict", lambda _: response)
    assert "[red]x[/nope]" in Run(engine, REQUEST, request="-").err


def test_out_takes_the_answers_and_the_options_lie_beside_it(engine: FakeEngine, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    run = Run(engine, REQUEST, request="-", out=str(out), split="aligned")
    assert run.out == ""
    assert json.loads(out.read_bytes()) == FakeResponse(REQUEST).to_dict()
    saved = OmegaConf.load(tmp_path / "a.json.config.yaml")
    assert (saved.split, saved.gemm, saved.schedule, saved.device) == ("aligned", "fixed", "levels", "cpu")
    assert len(list(tmp_path.iterdir())) == 2


def test_the_engine_gets_the_resolved_options(engine: FakeEngine) -> None:
    Run(engine, schedule="auto", dtype="auto")
    assert (engine.configs[0].schedule, engine.configs[0].dtype) == ("levels", "float32")


def test_one_bad_request_is_raised_and_nothing_is_written(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        Run(engine, b"bad", request="-", out=str(tmp_path / "a.json"))
    assert list(tmp_path.iterdir()) == []
    assert engine.open == 0


def test_a_folder_that_cannot_be_written_is_named(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out=.*/missing/a\.json: No such file"):
        Run(engine, REQUEST, request="-", out=str(tmp_path / "missing" / "a.json"))


def test_a_request_file_that_is_not_there_is_told_with_its_neighbour(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "ticket.json").write_bytes(REQUEST)
    for name in ("tiket.json", "tiket.jsonl"):
        with pytest.raises(ConfigError, match=rf"request=.*{name}: no such file; did you mean 'ticket\.json'\?"):
            Run(engine, request=str(tmp_path / name))
    assert engine.configs == []


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"one\n\n  \nbad\r\nbroken\nlast")
    return path


def test_lines_are_answered_one_by_one_and_bad_ones_get_an_error_row(engine: FakeEngine, lines: Path) -> None:
    run = Run(engine, request=str(lines))
    assert run.code == 1
    assert [json.loads(line) for line in run.out.splitlines()] == [
        {"line": 1, **FakeResponse(b"one").to_dict()},
        {"line": 4, "error": "state must be text", "field": "state"},
        {"line": 5, "error": "not finite", "field": None},
        {"line": 6, **FakeResponse(b"last").to_dict()},
    ]
    assert run.err == "4 requests; 2 failed\n"
    assert len(engine.configs) == 1


def test_lines_without_a_failure_give_code_0(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b"a\nb\n")
    out = tmp_path / "out.jsonl"
    assert Run(engine, request=str(tmp_path / "r.jsonl"), out=str(out)).code == 0
    assert [row["line"] for row in rows(out)] == [1, 2]
    assert (tmp_path / "out.jsonl.config.yaml").exists()


def test_ctrl_c_keeps_what_is_done_and_the_next_run_goes_on(engine: FakeEngine, tmp_path: Path) -> None:
    requests, out = tmp_path / "r.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(b"a\nb\nstop\nd\n")
    with pytest.raises(KeyboardInterrupt):
        Run(engine, request=str(requests), out=str(out))
    assert [row["line"] for row in rows(out)] == [1, 2]
    assert engine.open == 0

    requests.write_bytes(b"a\nb\nc\nd\n")
    run = Run(engine, request=str(requests), out=str(out))
    assert run.code == 0
    assert engine.seen == [b"a", b"b", b"c", b"d"]
    assert [row["line"] for row in rows(out)] == [1, 2, 3, 4]
    assert run.err == "4 requests, 2 of them from an earlier run; 0 failed\n"


def test_a_row_that_was_cut_off_is_done_again(engine: FakeEngine, tmp_path: Path) -> None:
    requests, out = tmp_path / "r.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(b"a\nb\n")
    Run(engine, request=str(requests), out=str(out))
    whole = out.read_bytes()
    out.write_bytes(whole[:-10])
    Run(engine, request=str(requests), out=str(out))
    assert out.read_bytes() == whole
    assert engine.seen == [b"a", b"b", b"b"]


def test_nothing_is_loaded_when_every_line_has_its_row_and_failures_still_count(
    engine: FakeEngine, lines: Path, tmp_path: Path
) -> None:
    options = {"request": str(lines), "out": str(tmp_path / "out.jsonl")}
    assert Run(engine, **options).code == 1
    again = Run(engine, **options, progress=False)
    assert again.code == 1
    assert again.err == "4 requests, 4 of them from an earlier run; 2 failed\n"
    assert len(engine.configs) == 1


def test_rows_of_other_options_are_not_mixed(engine: FakeEngine, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    Run(engine, request=str(lines), out=str(out))
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=r"out=.*out\.jsonl was begun with split=exact; give the same options"):
        Run(engine, request=str(lines), out=str(out), split="aligned")
    assert out.read_bytes() == before


@pytest.mark.parametrize("content", ["my notes", "my notes\n", '{"line": 1}\n'])
def test_a_file_of_somebody_else_is_left_alone(engine: FakeEngine, lines: Path, tmp_path: Path, content: str) -> None:
    out = tmp_path / "notes.txt"
    out.write_text(content)
    with pytest.raises(ConfigError, match="is not from this command"):
        Run(engine, request=str(lines), out=str(out))
    assert out.read_text() == content


@pytest.mark.parametrize("row", ["[]", "{}", "null", "no", '{"line": "x"}'])
def test_a_row_that_is_none_is_told_by_its_line(engine: FakeEngine, lines: Path, tmp_path: Path, row: str) -> None:
    out = tmp_path / "out.jsonl"
    Run(engine, request=str(lines), out=str(out))
    damaged = out.read_text().replace("\n", f"\n{row}\n", 1)
    out.write_text(damaged)
    with pytest.raises(ConfigError, match=r"line 2 is not a row of this command"):
        Run(engine, request=str(lines), out=str(out))
    assert out.read_text() == damaged


# Through Hydra, in this process.

Command = Callable[..., tuple[int, list[Any]]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs `score` with these words; the exit code and the options each job got. The folder must stay empty."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # restored afterwards
    monkeypatch.chdir(tmp_path)

    def run(*words: str, job: Callable[[ScoreConfig], int] = lambda _: 0) -> tuple[int, list[Any]]:
        monkeypatch.setattr(sys, "argv", ["score", *words])
        got: list[ScoreConfig] = []

        def recorded(config: ScoreConfig) -> int:
            got.append(config)
            return job(config)

        code = cli.run_command("score", ScoreConfig, recorded)
        assert list(tmp_path.iterdir()) == []
        return code, got

    return run


def test_options_arrive_typed(command: Command) -> None:
    words = ("model=9b", "checkpoint=random", "seed=7", "tokens.control=special", "device=cuda:1", "request=-")
    code, [config] = command(
        *words, "graphs=captured", "warmup=[64,3136]", "memory.limit_gib=24", "memory.graphs_gib=1"
    )
    assert code == 0
    assert (config.model, config.seed, config.device, config.request) == ("9b", 7, "cuda:1", "-")
    assert config.tokens.control == "special"
    assert (config.graphs, config.warmup) == ("captured", [64, 3136])
    assert (config.memory.limit_gib, config.memory.graphs_gib) == (24.0, 1.0)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["spilt=exact"], "score: spilt is not an option; did you mean 'split'?"),
        (["tokens.contrl=plain"], "score: tokens.contrl is not an option; did you mean 'tokens.control'?"),
        (["+gem=fixed"], "score: gem is not an option; did you mean 'gemm'?"),
        (["engine.dtype=bf17"], "score: engine.dtype is not an option"),
        (["dtype=bf17"], "score: dtype=bf17 is not one of auto, bfloat16, float32"),
        (["model=foo"], "score: model=foo is not one of tiny, 4b, 9b, 27b"),
        (["gemm=tunde"], "score: gemm=tunde is not one of auto, default, fixed, tuned; did you mean 'tuned'?"),
        (["graphs=capture"], "score: graphs=capture is not one of auto, eager, compiled, captured; did you mean"),
        (["warmup=[0]"], "score: warmup=0 is not a whole number from 1 to 16,384"),
        (["memory.limit_gib=0"], "score: memory.limit_gib=0.0 is not a positive number"),
        (["max_length=-1"], "score: max_length=-1 is not a whole number from 1 to 16,384"),
        (["max_length=long"], "score: max_length=long: Value 'long' of type 'str' could not be converted to Integer"),
        (["hydra.ouput_subdir=x"], "score: hydra.ouput_subdir is not an option; did you mean 'hydra.output_subdir'?"),
        (["+hydra.run.dri=x"], "score: hydra.run.dri is not an option; did you mean 'hydra.run.dir'?"),
        (["hydra/job_loging=x"], "score: hydra/job_loging is not an option; did you mean 'hydra/job_logging'?"),
        (["hydra/launcher=joblib"], "score: hydra/launcher=joblib is not one of basic"),
        (["model"], "score: Error parsing override 'model' missing EQUAL at '<EOF>'"),
        (["request=a,b"], "score: Ambiguous value for argument 'request=a,b'"),
        (["-m", "split=exact,aligne"], "score: split=aligne is not one of exact, aligned; did you mean 'aligned'?"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    command: Command, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert command(*words) == (2, [])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("no"), 2), (RequestError("no"), 2), (InferenceError("no"), 1), (OSError(28, "No space left"), 1)],
)
def test_errors_of_a_job_are_one_line(
    command: Command, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def fail(_: ScoreConfig) -> int:
        raise error

    assert command(job=fail)[0] == code
    assert capsys.readouterr() == ("", f"score: {error}\n")


def test_a_bug_keeps_its_traceback(command: Command) -> None:
    def fail(_: ScoreConfig) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command(job=fail)


def test_ctrl_c_is_code_130(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: ScoreConfig) -> int:
        raise KeyboardInterrupt

    assert command(job=interrupt)[0] == 130
    assert capsys.readouterr().err == "score: interrupted\n"


def test_a_sweep_runs_every_job_and_leaves_no_folder(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    def fail_first(config: ScoreConfig) -> int:
        if config.split == "exact" and config.gemm == "fixed":
            raise InferenceError("not finite")
        return 0

    code, configs = command("-m", "split=exact,aligned", "gemm=fixed,default", job=fail_first)
    assert code == 1
    assert [(c.split, c.gemm) for c in configs] == [
        ("exact", "fixed"), ("exact", "default"), ("aligned", "fixed"), ("aligned", "default"),
    ]  # fmt: skip
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[:3] == ["--- split=exact gemm=fixed", "score: not finite", "--- split=exact gemm=default"]


def test_help_tells_what_can_be_set(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        command("--help")
    assert not exit.value.code
    text = capsys.readouterr().out
    for part in ("request=FILE.jsonl", "schedule: auto, batched, independent, levels, tree", "max_length: 4096"):
        assert part in text


def explained(**options: Any) -> str:
    out = io.StringIO()
    assert explain(ExplainConfig(device="cpu", **options), stdin=io.BytesIO(REQUEST), stdout=out) == 0
    return out.getvalue()


def test_explain_needs_neither_weights_nor_a_cache(tmp_path: Path) -> None:
    report = json.loads(explained(model="27b", format="json", cache_dir=str(tmp_path)))
    assert list(report["layouts"]) == ["exact", "aligned"]
    assert report["candidates"] == 7
    assert 0 < report["layouts"]["exact"]["rows"] < report["layouts"]["aligned"]["rows"] < report["full_rows"]
    assert 47 < report["weight_bytes"] / 2**30 < 48
    assert list(tmp_path.iterdir()) == []


def test_explain_draws_the_chosen_split_of_the_request_it_names() -> None:
    text = explained(model="9b", split="aligned", request="-")
    assert "request: standard input" in text
    assert "aligned prefixes" in text
    assert "choose it with tokenizer=FOLDER" in text


def test_explain_reads_dimensions_and_tokenizer_of_a_checkpoint(tmp_path: Path) -> None:
    from engine.tiny import tiny_checkpoint

    folder = tiny_checkpoint(tmp_path, layers=8)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    report = json.loads(explained(checkpoint=str(folder), format="json"))
    assert report["tokenizer"] == str(folder)
    assert report["weight_bytes"] > 1.5 * json.loads(explained(format="json"))["weight_bytes"]


def test_explain_refuses_what_scoring_would() -> None:
    with pytest.raises(RequestError, match="exceeds max_length=16"):
        explained(max_length=16)


def test_the_module_runs_on_its_own(tmp_path: Path) -> None:
    """The real engine, a sweep of two, from a folder that holds nothing."""
    (tmp_path / "work").mkdir()
    words = ["-m", "split=exact,aligned", "device=cpu", f"cache_dir={tmp_path / 'cache'}"]
    run = subprocess.run(
        [sys.executable, "-m", "engine.score", *words],
        cwd=tmp_path / "work",
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    first, end = json.JSONDecoder().raw_decode(run.stdout)
    second = json.loads(run.stdout[end:])
    assert first["answers"] == second["answers"]
    assert (first["metadata"]["split"], second["metadata"]["split"]) == ("exact", "aligned")
    assert first["metadata"]["weights"] == "random"
    assert list((tmp_path / "work").iterdir()) == []
