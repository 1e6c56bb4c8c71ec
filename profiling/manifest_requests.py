"""The requests of the sets M1, M3, M4 and M5: which question is asked of which text, and how long the text should be.

A recipe fixes everything but two numbers, a seed and a word count, which `manifest.json` holds; they were chosen so
that the request has the recipe's length with the Qwen3.5 tokenizer. M2 is in `manifest_workflows.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from manifest_text import GENRES, Draw

Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one request is made: `build(draw, words)` with a state of so many words.

    `tokens` is the length to aim at: of the prefix that all prompts share, or of the prompt where there is only one.
    Recipes with one `stream` and length get the same state.
    """

    name: str
    stream: str
    tokens: int
    build: Callable[[Draw, int], Body]

    @property
    def set(self) -> str:
        return self.name.partition("/")[0]


def decision(state: Any, question: dict[str, Any]) -> Body:
    return {"state": state, "questions": {"decision": question}}


# M1: one choice, so many candidates, over so long a state.

M1_CANDIDATES = (2, 8, 32, 128, 255)
M1_PREFIXES = {256: 278, 1024: 1048, 3072: 3093}
"""Tokens of the state, about, and of the shared prefix, exactly."""

# Every team's name begins with another token, so that the shared prefix ends before the names.
_TEAMS = """\
billing refunds delivery returns warranty repairs packaging customs pricing vouchers invoices payroll contracts
insurance audit tax treasury loans leasing hiring training travel catering cleaning security parking gardens heating
cooling lighting plumbing electrical roofing elevators doors windows furniture printers laptops phones networks servers
storage backups databases email calendars passwords certificates monitoring search checkout catalogue images
video audio maps weather translation accessibility privacy consent cookies analytics reporting dashboards exports
imports migration scheduling notifications messaging chat forums surveys newsletters advertising sponsorship events
tickets memberships loyalty gifts auctions wholesale retail franchise suppliers procurement inventory warehouse freight
shipping pallets trucks vans bicycles trains aircraft boats fuel batteries tyres engines brakes sensors cameras
drones robots lasers pumps valves filters boilers turbines solar wind hydro grid meters cables switches transformers
circuits chips displays keyboards speakers microphones headsets toys games books magazines music films theatre museums
libraries schools kindergarten universities exams grants scholarships research laboratory chemicals gases waste
recycling water sewage roads bridges tunnels traffic signals harbours airports stations emergency ambulance fire police
courts prisons passports visas elections taxes pensions housing rent mortgages land forestry farming fishing dairy
bakery meat fruit vegetables coffee tea wine beer spirits tobacco pharmacy vaccines clinics dental optics hearing
nursing surgery radiology blood genetics nutrition fitness swimming football tennis skiing hiking camping hotels
restaurants bars cruises tours guides rentals keys locks alarms patrols uniforms laundry textiles shoes jewellery
watches cosmetics perfume hair pets horses cattle poultry bees seeds fertiliser machinery tools steel timber concrete
glass plastics paint paper ink adhesives rubber leather wool cotton silk furnishings antiques estates"""
_DUTIES = (
    "Faults and complaints about {name} at {site}.",
    "Anything about {name} that nobody else is able to settle.",
    "Orders for {name} that were damaged or too late.",
    "Safety reports about {name} that were made at night.",
    "Costs and approvals for {name} above {#3} euros.",
    "Changes to {name} that the {role} asked for.",
)
_TEAMS_SEED = 875


def teams(count: int) -> dict[str, str]:
    """The first `count` teams, each with what it does."""
    draw = Draw("m1", "teams", _TEAMS_SEED)
    return {name: draw.fill(draw.pick(_DUTIES).replace("{name}", name)) for name in _TEAMS.split()[:count]}


def _m1(candidates: int, draw: Draw, words: int) -> Body:
    question = {"type": "choice", "instructions": "Which team should handle this issue?", "criteria": teams(candidates)}
    return {"state": draw.records(words), "questions": {"team": question}}


def m1() -> Iterator[Recipe]:
    for state, tokens in M1_PREFIXES.items():
        for candidates in M1_CANDIDATES:
            build = partial(_m1, candidates)
            yield Recipe(name=f"m1/{state}x{candidates}", stream=f"m1/{state}", tokens=tokens, build=build)


# M3: one score over a state of 1,024 tokens.

_URGENCY = (
    "No action needed: nothing in the records is open.",
    "Can wait for the next regular review.",
    "Worth a look within the month.",
    "Should be planned for the coming week.",
    "Needs an owner by the end of the week.",
    "Has to be started within two days.",
    "Due today, during normal working hours.",
    "Urgent: somebody must be called within the hour.",
    "Critical: work elsewhere stops until this is done.",
    "Emergency: people or data are in danger now.",
)
_M3_PREFIX = 1_048


def _m3(levels: int, draw: Draw, words: int) -> Body:
    question = {"type": "score", "instructions": "How urgent is the most urgent of these records?"}
    return {
        "state": draw.records(words),
        "questions": {"urgency": {**question, "criteria": spread(_URGENCY, levels)}},
    }


def m3() -> Iterator[Recipe]:
    for levels in (5, 10):
        yield Recipe(name=f"m3/1024x{levels}", stream="m3/1024", tokens=_M3_PREFIX, build=partial(_m3, levels))


def spread(levels: Sequence[str], count: int) -> list[str]:
    """`count` of `levels`, the first and the last among them, evenly spaced."""
    return [levels[i * (len(levels) - 1) // (count - 1)] for i in range(count)]


# M4: yes or no; M5: three to six candidates. Each over one text of one genre.

_CHECKS: dict[str, tuple[str, ...]] = {
    "ticket": (
        "Does the customer ask for money back?",
        "Has the customer written about the same problem before?",
        "Did the agent promise anything with a date?",
    ),
    "mail": (
        "Does anyone in the thread still owe an answer?",
        "Is a decision about money reported here?",
        "Could this mail be forwarded to a supplier without giving away anything internal?",
    ),
    "log": (
        "Did any service run out of disk space?",
        "Is there a sign-in that should be looked at by a person?",
        "Had the queue returned below its limit by the end of the log?",
    ),
    "device": (
        "Is any alarm still waiting for somebody to look at it?",
        "Would it be safe to enter the boiler room now?",
        "Is at least one pump running normally?",
    ),
    "table": (
        "Is there an order that is on hold and already due?",
        "Do all orders for building C have a delivery date?",
        "Does any single line come to more than 50,000?",
    ),
    "incident": (
        "Was the cause found before the report ends?",
        "Did customers notice the incident?",
        "Is there reason to believe that data left the system?",
    ),
    "trace": (
        "Did the agent reach its goal?",
        "Did the agent try something that it was not allowed to do?",
        "Should a person take over this run?",
    ),
    "invoice": (
        "May this invoice be paid in full as it stands?",
        "Were the bank details confirmed by a second channel?",
        "Do the goods received match the quantities invoiced?",
    ),
}
_MEANING = {
    "true": "The text says so, or it follows from figures in the text.",
    "false": "The text says the opposite, or leaves it open.",
}
_OPTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "ticket": (
        "What should the agent do next?",
        {
            "refund": "Return the amount in question after comparing it with the payment records.",
            "replace": "Send a new part or a new device without waiting for the old one.",
            "ask": "Request the one detail that is missing before anything else is decided.",
            "escalate": "Hand the conversation to somebody who may decide on larger amounts.",
            "explain": "Describe what has already been done, since nothing else is open.",
            "close": "End the conversation because the customer has said that it is settled.",
        },
    ),
    "mail": (
        "What is the main purpose of the latest message in this thread?",
        {
            "inform": "It passes on a fact or a date and expects nothing from its readers.",
            "request": "It asks a named person or role to do something by a certain day.",
            "decide": "It records what was agreed, so that it can be looked up later.",
            "object": "It argues against a plan that somebody else has put forward.",
            "invite": "It proposes a time and a place for people to meet.",
            "chase": "It reminds somebody of an answer that is already overdue.",
        },
    ),
    "log": (
        "Which explanation fits the whole of this log best?",
        {
            "storage": "A volume is full, and the other errors follow from writes that failed.",
            "network": "Hosts cannot reach each other, so calls time out and are tried again.",
            "load": "More requests arrive than are served, and queues grow past their limits.",
            "rollout": "A new version behaves differently from the one that it replaces.",
            "abuse": "Somebody outside tries accounts one after the other from few addresses.",
            "normal": "The messages are those of an ordinary day and need no explanation.",
        },
    ),
    "device": (
        "What should the building's controller do in the next minute?",
        {
            "wait": "Keep every output as it is and read all of the sensors once more.",
            "heat": "Raise the set point of the coldest room by one degree.",
            "ventilate": "Open the valves of the rooms whose humidity is above eighty per cent.",
            "stop": "Switch off the motor or pump whose readings are outside their range.",
            "alert": "Call the engineer on duty, because an alarm has not been acknowledged.",
            "unlock": "Release the doors on the escape route and switch on the lights.",
        },
    ),
    "table": (
        "Which order should be handled first?",
        {
            "oldest": "The one whose date lies furthest back, whatever it is worth.",
            "largest": "The one with the highest quantity times unit price.",
            "blocked": "The one that is on hold, since nothing moves until somebody acts.",
            "returned": "The one that came back and has to be inspected and credited.",
            "undated": "The one that has no date yet and would otherwise be forgotten.",
            "none": "None of them: every line is either finished or moving as planned.",
        },
    ),
    "incident": (
        "Who should own this incident from here on?",
        {
            "operations": "The people on shift, because the remedy is to move or restart something.",
            "development": "The authors of the service, because a change of theirs has to be undone.",
            "security": "The response team, because an account or a host may be in wrong hands.",
            "facilities": "The site's staff, because power, cooling or a gate is the cause.",
            "communication": "The press desk, because customers have noticed and ask questions.",
            "nobody": "No one: it is over, its cause is known and nothing is left to do.",
        },
    ),
    "trace": (
        "How should this run of the agent be judged?",
        {
            "success": "The goal was reached and each step was allowed and needed.",
            "detour": "The goal was reached, but several steps were repeated or led nowhere.",
            "stuck": "The agent repeats a call that fails and does not change its approach.",
            "unsafe": "The agent tried to do something for which it had no approval.",
            "wrong": "The agent reports a result that its own observations contradict.",
            "unfinished": "The trace ends before there is anything to judge.",
        },
    ),
    "invoice": (
        "What should be done with this invoice?",
        {
            "pay": "Transfer the full amount on the due date, since everything agrees.",
            "shorten": "Pay what was received and ask for a credit note over the rest.",
            "hold": "Wait for a document that is named here but not attached.",
            "approve": "Route it to somebody whose limit is at least the invoiced amount.",
            "verify": "Call the supplier on a known number about the new bank details.",
            "reject": "Send it back, since the same delivery has been invoiced before.",
        },
    ),
}
_SCALES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "How much harm is done if nobody looks at this before tomorrow?",
        (
            "None at all, since nothing described here changes overnight.",
            "Hardly any: a delay that nobody outside the team would notice.",
            "Some inconvenience for one person, easily made good afterwards.",
            "A noticeable loss of money or time for several people.",
            "Serious damage that takes weeks and outside help to repair.",
            "Danger to people, or a loss that cannot be made good at all.",
        ),
    ),
    (
        "How complete is the information for a decision?",
        (
            "Empty of anything that would help, apart from names and numbers.",
            "Fragments that suggest a direction but could be read either way.",
            "Enough for a guess, while the most important figure is missing.",
            "Mostly complete, with one open question that can be asked quickly.",
            "Complete, although two of the sources disagree on a minor point.",
            "Fully documented, consistent and confirmed by a second person.",
        ),
    ),
)
M4_REQUESTS = 74
M5_CANDIDATES = {3: 30, 4: 54, 5: 43, 6: 30}
"""Requests by number of candidates: 157 requests, 701 candidates."""
_M4_TOKENS = ((0, 80), (0.25, 150), (0.5, 290), (0.75, 430), (0.9, 900), (0.95, 2_600), (1, 3_399))
_M5_TOKENS = ((0, 90), (0.2, 170), (0.5, 400), (0.75, 800), (0.92, 1_460), (1, 3_000))
"""Share of the requests that are shorter, and tokens; straight lines between."""


def _length(points: Sequence[tuple[float, int]], share: float) -> int:
    for (x, low), (end, high) in pairwise(points):
        if share <= end:
            return round(low + (high - low) * (share - x) / (end - x))
    raise AssertionError(share)


def _state(index: int, genre: str, draw: Draw, words: int) -> Any:
    """The text as it comes, as lines, or as a field of a record."""
    id, verified = draw.fill("{#6}"), draw.below(2) == 1
    text = draw.passage(genre, words)
    match index // len(GENRES) % 3:
        case 0:
            return text
        case 1:
            return text.split("\n")
        case _:
            return {"id": id, "source": genre, "text": text, "verified": verified}


def _m4(index: int, draw: Draw, words: int) -> Body:
    genre = GENRES[index % len(GENRES)]
    question: dict[str, Any] = {"type": "noul", "instructions": draw.pick(_CHECKS[genre])}
    if index % 5 == 4:
        question["criteria"] = _MEANING
    return decision(_state(index, genre, draw, words), question)


def m4() -> Iterator[Recipe]:
    order = Draw("m4", "lengths").shuffled(range(M4_REQUESTS))
    for index, place in enumerate(order):
        tokens = _length(_M4_TOKENS, place / (M4_REQUESTS - 1))
        yield Recipe(name=f"m4/{index:03}", stream=f"m4/{index}", tokens=tokens, build=partial(_m4, index))


def _m5(index: int, candidates: int, draw: Draw, words: int) -> Body:
    genre = GENRES[index % len(GENRES)]
    question: dict[str, Any]
    if index % 3 == 2:
        instructions, levels = draw.pick(_SCALES)
        question = {"type": "score", "instructions": instructions, "criteria": spread(levels, candidates)}
    else:
        instructions, options = _OPTIONS[genre]
        chosen = draw.shuffled(list(options.items()))[:candidates]
        question = {"type": "choice", "instructions": instructions, "criteria": dict(chosen)}
    return decision(_state(index, genre, draw, words), question)


def m5() -> Iterator[Recipe]:
    requests = sum(M5_CANDIDATES.values())
    counts = Draw("m5", "candidates").shuffled([n for n, times in M5_CANDIDATES.items() for _ in range(times)])
    order = Draw("m5", "lengths").shuffled(range(requests))
    for index, (place, candidates) in enumerate(zip(order, counts, strict=True)):
        tokens = _length(_M5_TOKENS, place / (requests - 1))
        build = partial(_m5, index, candidates)
        yield Recipe(name=f"m5/{index:03}", stream=f"m5/{index}", tokens=tokens, build=build)
