"""The frozen workloads: the bodies that their hashes name, with the counts of the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import workloads
from workloads import SETS, digest, workload_named

from engine import ConfigError, parse_request
from engine.plan.layout import build_layout
from engine.wire.processor import to_prompts
from engine.wire.prompts import build_prompts
from tests.wire.qwen_vocabulary import qwen_tokens

EVERY = workloads.workloads()


def test_all_253_requests_are_there_and_no_two_alike() -> None:
    shape = {s: (len(m), sum(w.candidates for w in m)) for s in SETS for m in [[w for w in EVERY if w.set == s]]}
    assert shape == {"m1": (15, 1_275), "m2": (5, 92), "m3": (2, 15), "m4": (74, 74), "m5": (157, 701)}
    assert (sum(w.logical_tokens for w in EVERY), sum(w.unique_tokens for w in EVERY)) == (2_499_270, 239_076)
    assert len({w.sha256 for w in EVERY}) == len({w.name for w in EVERY}) == 253


def test_every_line_holds_what_the_engine_counts() -> None:
    tokens = qwen_tokens("plain")
    for one in EVERY:
        request = parse_request(json.dumps(one.body))
        built = build_prompts(request, tokens, 16_384)
        layout = build_layout(to_prompts([q.prompts for q in built.questions], 1 << 20), "exact")
        found = (layout.full_rows, layout.unique_rows, layout.request_prefix_tokens)
        assert found == (one.logical_tokens, one.unique_tokens, one.shared_prefix), one.name
        assert (len(request.questions), request.num_candidates) == (one.questions, one.candidates), one.name
        assert max(max(q.lengths) for q in built.questions) == one.longest_prompt, one.name


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    text, path = (workloads.FOLDER / "m3.jsonl").read_text(), tmp_path / "m3.jsonl"
    first = workload_named("m3/1024x5").body["questions"]["urgency"]["criteria"]
    turned = text.replace(json.dumps(first)[1:-1].replace('", "', '","'), json.dumps(first[::-1])[1:-1], 1)
    for changed, message in (
        (turned, r"^m3/1024x5: the body has sha256 .*restore it"),
        (text[:-40], r"m3\.jsonl: Invalid JSON.*restore the file"),
    ):
        assert changed != text
        path.write_text(changed)
        with pytest.raises(ConfigError, match=message):
            workloads.workloads(["m3"], tmp_path)


def test_one_body_is_printed_as_a_request_file_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert workloads.main(["m2/triage_28"]) == 0
    assert digest(json.loads(capsys.readouterr().out)) == workload_named("m2/triage_28").sha256
    assert workloads.main([]) == 0
    assert "all\t253\t318\t2,157\t2,499,270\t239,076" in capsys.readouterr().out
    assert workloads.main(["m1/1024x33"]) == 2
    assert "did you mean 'm1/1024x32'" in capsys.readouterr().err
