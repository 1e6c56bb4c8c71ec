"""Text that reads like tickets, mails, logs, device states and tables, drawn from a seed.

Every word is this project's own; nothing names a real person, company or product. The same seed gives the same text on
every Python: of `random`, only the sequence of `random()` is used, which Python keeps.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

GENRES: Final = ("ticket", "mail", "log", "device", "table", "incident", "trace", "invoice")
_SECTION_WORDS: Final = 120
_WORD: Final = re.compile(r"(?:\w+|[^\w\s])\s*")
_DAY: Final = 86_400

# A slot `{name}` is replaced by one of the words or lines of that name, whose own slots are filled in turn; `{#4}` is a
# number of four digits; `{now}` and `{stamp}` tell the time, which goes on from slot to slot.
_WORDS: Final = {
    "day": "Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday",
    "date": "{d} January | {d} March | {d} April | {d} June | {d} August | {d} October | {d} November",
    "iso": "2026-02-{dd} | 2026-03-{dd} | 2026-05-{dd} | 2026-07-{dd} | 2026-09-{dd} | 2026-11-{dd}",
    "d": " | ".join(str(day) for day in range(1, 29)),
    "dd": " | ".join(f"{day:02}" for day in range(1, 29)),
    "mm": " | ".join(f"{minute:02}" for minute in range(60)),
    "time": "8:{mm} | 9:{mm} | 10:{mm} | 11:{mm} | 13:{mm} | 14:{mm} | 16:{mm} | 17:{mm} | 19:{mm}",
    "money": "{#2}.{mm} | {#3}.{mm} | {#2}.90 | 1,{#3}.00",
    "channel": "web form | telephone | chat | e-mail | post | the mobile app",
    "product": "kettle | desk lamp | garden pump | thermostat | bicycle light | office chair | water filter"
    " | door camera | label printer | handheld scanner | travel adapter | smoke alarm | standing desk",
    "part": "lid | power lead | hinge | battery | display | left bracket | seal | mounting plate | filter",
    "fault": "does not switch on | makes a grinding noise | leaks when it is full | shuts off after a few minutes"
    " | shows error {#2} | loses its connection every evening | smells of hot plastic | arrived with a crack",
    "site": "the northern depot | the harbour site | the airport warehouse | building C | the valley branch",
    "role": "night shift lead | duty engineer | account manager | warehouse clerk | auditor | site manager",
    "service": "checkout | inventory | session-store | mailer | search-index | rate-limiter | image-resizer | ledger"
    " | auth-gateway | report-builder | webhook-relay | scheduler",
    "host": "node-{#2} | edge-{#2} | worker-{#3} | db-replica-{#1}",
    "level": "INFO | INFO | INFO | WARN | ERROR | DEBUG",
    "hex": "a{#2}c | b{#2}d | c{#1}e{#1} | {#1}d{#1}f | e{#2}a | f{#1}b{#1} | {#2}ab | {#1}bc{#1}",
    "ip": "10.{#2}.{#1}.{#2} | 192.168.{#1}.{#2} | 172.16.{#2}.{#2}",
    "room": "boiler room | east corridor | cold store | loading bay | server cupboard | greenhouse | lobby",
    "weather": "after the storm | during the heatwave | since the first frost | on a calm day | in heavy rain",
    "item": "white A4 paper | toner cartridges | cable ties of 200 mm | hydraulic oil, 5 l | safety gloves | M8 bolts"
    " | courier service | weekly cleaning | pallet hire | annual software licence",
    "state": "open | paid | on hold | shipped | returned | awaiting stock | cancelled | approved",
    "alarm": "smoke | water on the floor | temperature above limit | no contact for {#2} minutes | power lost",
    "mode": "on | off | in manual mode | waiting for the tank | blocked by the interlock",
    "goal": "book {#1} rooms for {date} | find the cheapest {product} | reconcile order {#6} | restart {service}",
    "subject": "delivery to {site} | quote for {#2} units | access for the {role} | minutes of {day} | audit prep",
    "symptom": "answered with errors for {#2} percent of requests | stopped writing its log | restarted {#1} times"
    " | sent {#3} MB to an address outside the network | used all of its memory | served a stale certificate",
    "yes": "yes | no | not yet | call not answered",
}

_LINES: Final[dict[str, tuple[str, ...]]] = {
    # Support conversations
    "ticket_head": ("Ticket {#5}, opened {date} at {now} by {channel}, priority not set.",),
    "ticket": (
        "Customer: {complaint} {detail} {wish}",
        "Customer: {detail} {wish}",
        "Customer: {complaint} {wish}",
        "Agent: {reply} {step}",
        "Agent: {step} {reply}",
        "System: order {#6} is {state}; last change on {date}.",
        "Internal note: {detail} The {role} was told on {day}.",
    ),
    "complaint": (
        "The {product} I bought on {date} {fault}.",
        "I was charged {money} twice for order {#6}.",
        "My parcel was marked as delivered on {day}, but nothing came.",
        "Since the update the app closes as soon as I open my orders.",
        "The {part} of the {product} is missing from the box.",
        "I cancelled the plan on {date} and was still billed {money}.",
    ),
    "detail": (
        "It worked for about {#1} days before that.",
        "I have already tried another socket and a second {part}.",
        "The receipt says {money} and the bank shows {money}.",
        "A neighbour has the same {product} and no such problem.",
        "The driver left a card with the number {#6} on it.",
        "This is message number {#1} about it, the first was on {date}.",
        "Photos are attached, the damage to the {part} is on the second one.",
    ),
    "wish": (
        "Please send the money back before {day}.",
        "I would rather have a replacement than a refund.",
        "Can someone call me after {time}?",
        "If this is not settled by {date}, I will close the account.",
        "Please tell me whether I have to return the {part} as well.",
        "There is no hurry, but I would like an answer in writing.",
    ),
    "reply": (
        "Thank you for the details, I can see the order here.",
        "I am sorry for the trouble with the {product}.",
        "The second payment of {money} is a reservation and will lapse on {day}.",
        "I have passed this to the {role}, who answers within two days.",
        "Could you confirm the serial number, it starts with {#2}?",
    ),
    "step": (
        "A label for the return was sent to the address on file.",
        "I have blocked further charges until the {role} has looked at it.",
        "Please hold the reset key for {#1} seconds and try again.",
        "A new {part} leaves {site} on {day}.",
        "Nothing was changed on the account so far.",
    ),
    # Mail threads
    "mail_head": ("Subject: {subject} ({date})",),
    "mail": (
        "Hello all. {plan} {reason} Regards, the {role}",
        "{reason} {plan} Could the {role} confirm by {day}?",
        "Thanks for the quick answer. {plan}",
        "One more point on the budget: {reason}",
        "From: {role}. Sent: {day}, {time}. {plan} {reason} {ask}",
        "{ask} {plan}",
    ),
    "plan": (
        "We move the count of {item} from {day} to {day}.",
        "The lift at {site} stays out of service until {date}.",
        "From {date} every order above {money} needs a second signature.",
        "I suggest that we keep the supplier for another year and review the price in spring.",
        "The new rota starts on {date}; swaps are fine if both sides agree in writing.",
        "The visitors arrive at {time} and need {#1} passes for the {room}.",
    ),
    "reason": (
        "The forwarder missed two of the last {#1} slots.",
        "Stock of {item} is down to {#2} boxes and the next lot is late.",
        "The inspector found the {room} unlocked {weather}.",
        "We spent {money} more than planned on {item}.",
        "Nobody objected when the {role} raised it last week.",
        "The old contract ends on {date} and cannot be extended.",
    ),
    "ask": (
        "Who can stand in for the {role} that week?",
        "Please do not forward this outside the team.",
        "Does anyone still have the drawing of the {part}?",
        "Send me the figures for {site} when you have them.",
    ),
    # Service logs
    "log_head": ("# {service} on {host}, build {hex}, from {stamp}",),
    "log": (
        "{stamp} INFO {service} request {hex} finished in {#3} ms with status 200",
        "{stamp} {level} {service} retry {#1} of 9 after a timeout from {ip}",
        "{stamp} WARN {service} queue depth {#4} is above the soft limit of 1500",
        "{stamp} ERROR {service} connection to {host} refused, next attempt in {#2} s",
        "{stamp} INFO {service} cache refreshed: {#4} entries, {#2} evicted",
        "{stamp} {level} {service} user {#5} signed in from {ip}",
        "{stamp} INFO {service} deployment {hex} reached {#2} percent of the fleet",
        "{stamp} ERROR {service} write to volume /data/{service} failed: no space left",
        "{stamp} DEBUG {service} feature flag new-{service}-path is off for tenant {#4}",
    ),
    # Device states
    "device_head": ("Controller {#4} in the {room}, firmware 4.{#1}.{#2}, reported at {stamp}",),
    "device": (
        "sensor {room} temperature=1{#1}.{#1} C humidity={#2} % battery={#2} %",
        "valve {#2}: open {#2} %, requested {#2} %, last moved {now}",
        "motor {#1}: {#4} rpm, current {#1}.{#2} A, bearing temperature {#2} C",
        "door {room}: closed since {now}, {#2} openings today",
        "alarm: {room}: {alarm}, acknowledged by the {role} at {now}",
        "pump {#1} {mode}, flow {#2}.{#1} l/min, running for {#3} hours since service",
        "schedule: heat {room} to 2{#1} C from 6:{mm} to {time} on {day}",
    ),
    # Tables
    "table_head": ("order | item | quantity | unit price | status | due | site",),
    "table": (
        "{#6} | {item} | {#2} | {money} | {state} | {iso} | {site}",
        "{#6} | {item} | {#1} | {money} | {state} | {iso} | {site}",
        "{#6} | {product}, spare {part} | {#2} | {money} | {state} | {iso} | {site}",
        "{#6} | {product} | {#3} | {money} | {state} | - | {site}",
    ),
    # Incident reports
    "incident_head": ("Incident {#4}, reported by the {role} on {day}, {date}, at {now}.",),
    "incident": (
        "{now} The {role} noticed that {service} on {host} {symptom}. {action}",
        "{now} {action} {effect}",
        "{now} A second alert came from {host}: {service} {symptom}. {effect}",
        "{now} {effect} The {role} at {site} was informed by telephone.",
        "{now} Sign-ins for account {#5} from {ip} were counted {#2} times within {#1} minutes. {action}",
    ),
    "action": (
        "Traffic was moved to {host} by hand.",
        "The last change to {service} was rolled back.",
        "No action was taken, the value was within its usual range.",
        "The disk was copied for later study and the machine isolated.",
        "The {role} asked for {#2} more minutes before closing {service}.",
    ),
    "effect": (
        "About {#3} orders had to be entered again.",
        "Customers saw prices of the day before.",
        "Nothing was lost, but the report for {day} came late.",
        "The gate at {site} stayed shut for {#2} minutes.",
        "It is not known yet whether personal data left the system.",
    ),
    # Traces of automated agents
    "trace_head": ("run {hex}: goal: {goal}",),
    "trace": (
        '[{now}] call search(query="{item}", limit={#2}) -> {#2} results in {#3} ms',
        '[{now}] call read_order(id={#6}) -> status "{state}", total {money}',
        "[{now}] thought: the total does not match, {money} is missing; look at the credit notes first",
        "[{now}] call send_message(to={role}) -> refused: needs approval",
        "[{now}] thought: the same call failed before, so try {service} instead of {service}",
        '[{now}] tool error: {service} "{alarm}" after {#2} s, retry allowed',
        "[{now}] answer draft: order {#6} is {state}, the rest follows on {day}",
    ),
    # Invoices and orders
    "invoice_head": ("Invoice {#6} of {date}, purchase order {#5}, payable within {#2} days, total {money}.",),
    "invoice": (
        "Line {#2}: {item}, quantity {#2}, unit price {money}, delivered to {site} on {date}.",
        "Goods receipt {#6}: {#2} of {item} counted by the {role}, {#1} damaged.",
        "Remark: {reason}",
        "Approval: the {role} signed on {day} for up to {money}.",
        "Bank details changed on {date}; confirmed by {channel}: {yes}.",
        "Credit note {#6} over {money} for {item} is {state}.",
    ),
}

_CHOICES: Final = {name: tuple(words.split(" | ")) for name, words in _WORDS.items()} | _LINES


class Draw:
    """A stream of choices that depends on `seed` alone."""

    def __init__(self, *seed: str | int) -> None:
        digest = hashlib.sha256("/".join(map(str, seed)).encode()).digest()
        self._random = random.Random(int.from_bytes(digest[:8], "big")).random
        self._seconds = self.below(7 * _DAY)  # of the week that `{stamp}` and `{now}` tell

    def below(self, end: int) -> int:
        """A number from 0 to `end` - 1."""
        return int(self._random() * end)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        pool = list(options)
        return [pool.pop(self.below(len(pool))) for _ in options]

    def fill(self, template: str) -> str:
        """`template` with every slot filled. An unknown slot is a `KeyError`."""
        return re.sub(r"\{(#?)(\w+)\}", lambda slot: self._slot(slot[1], slot[2]), template)

    def passage(self, genre: str, words: int) -> str:
        """The first `words` words and punctuation marks of an endless passage, cut wherever that is."""
        return _cut("\n".join(self._lines(genre, words)), words)

    def records(self, words: int) -> str:
        """As `passage`, of short passages in the genres' order."""
        sections: list[str] = []
        made = 0
        while made < words:
            sections.append("\n".join(self._lines(GENRES[len(sections) % len(GENRES)], _SECTION_WORDS)))
            made += _count(sections[-1])
        return _cut("\n\n".join(sections), words)

    def _lines(self, genre: str, words: int) -> list[str]:
        """A head, then lines until there are so many words."""
        lines = [self.fill(self.pick(_LINES[f"{genre}_head"]))]
        made, last = _count(lines[0]), ""
        while made < words:
            last = self.pick([template for template in _LINES[genre] if template != last])
            lines.append(self.fill(last))
            made += _count(lines[-1])
        return lines

    def _slot(self, number: str, name: str) -> str:
        if number:
            return str(1 + self.below(9)) + "".join(str(self.below(10)) for _ in range(int(name) - 1))
        if name in ("now", "stamp"):
            self._seconds += self.below(90)
            day, second = divmod(self._seconds, _DAY)
            minutes = f"{second // 3600:02}:{second // 60 % 60:02}"
            return minutes if name == "now" else f"2026-03-{9 + day:02}T{minutes}:{second % 60:02}Z"
        return self.fill(self.pick(_CHOICES[name]))


def _count(text: str) -> int:
    return len(_WORD.findall(text))


def _cut(text: str, words: int) -> str:
    return "".join(_WORD.findall(text)[:words]).rstrip()
