"""What the parser tests share: some tools, machines run over pieces, and events told as one text."""

from collections.abc import Iterable, Sequence

from server.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Machine, Reasoning
from server.parsers.registry import Tool, machine, reasoning_format, tool_format

WEATHER = Tool(
    "get_weather",
    "The weather of a city",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "spots": {"type": "array", "items": {"type": "number"}},
            "now": {"type": "boolean"},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    True,
)
NOW = Tool("now", None, None, True)
SEARCH = Tool(
    "поиск-web_2",
    None,
    {
        "type": "object",
        "properties": {"ключ": {"$ref": "#/$defs/word"}},
        "required": ["ключ"],
        "additionalProperties": False,
        "$defs": {"word": {"type": "string"}},
    },
    True,
)
ANY = Tool("anything", None, True, False)
TOOLS = (WEATHER, NOW, SEARCH, ANY)


def machine_of(
    tool: str | None, reasoning: str | None = None, *, opened: bool = False, tools: Sequence[Tool] = TOOLS
) -> Machine:
    return machine(tools, tool and tool_format(tool), reasoning and reasoning_format(reasoning), opened=opened)


def run(made: Machine, pieces: Iterable[str]) -> list[Event]:
    events = [event for piece in pieces for event in made.feed(piece)]
    return joined(events + made.end())


def joined(events: Sequence[Event]) -> list[Event]:
    """The events with neighbours of a kind merged."""
    whole: list[Event] = []
    for event in events:
        last = whole[-1] if whole else None
        match last, event:
            case (Content(a), Content(b)):
                whole[-1] = Content(a + b)
            case (Reasoning(a), Reasoning(b)):
                whole[-1] = Reasoning(a + b)
            case (Arguments(i, a), Arguments(j, b)) if i == j:
                whole[-1] = Arguments(i, a + b)
            case _:
                whole.append(event)
    return whole


def told(events: Sequence[Event]) -> str:
    """Events on one line: `text`, `~thought~`, `0:name{arguments}` with `.` where the call ended."""
    parts: list[str] = []
    for event in events:
        match event:
            case Content(text):
                parts.append(f"`{text}`")
            case Reasoning(text):
                parts.append(f"~{text}~")
            case CallStart(index, name, id):
                parts.append(f"{index}:{name}" + (f"#{id}" if id else ""))
            case Arguments(_, text):
                parts.append(text)
            case CallEnd():
                parts.append(".")
    return "".join(parts)


def ways(text: str) -> list[list[str]]:
    """The text whole, by characters, and in threes."""
    return [[text], list(text), [text[at : at + 3] for at in range(0, len(text), 3)]]
