"""Requests to a server with a chat template, and what their answers must have: the columns of templates.py."""

import json
import re
import urllib.error
import urllib.request

import replay

SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"],
          "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "paint_wall", "description": "Paints a wall", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA}}
HELLO = "the quick brown fox"
ASK = [{"role": "user", "content": HELLO}]


# A message of the assistant's, and its thought.
WORDS, VALUE, THOUGHT = "so be it", '{"colour": "red"}', "the wall is dry"
# Ends of a turn with calls that differ from those without.
CALL_ENDS = ["<|endoftext|>", "<|eom_id|>", "<|begin|>assistant", "<|tool_response>",
             "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"]
# A control token in front of content, which no real vocabulary shows.
TAG = r"^<\|\w+\|>"


class Refused(Exception):
    """The server answered with 400."""


class Failed(Exception):
    """The server dropped a part of the request silently, or failed."""


class Noted(Exception):
    """The server dropped a part of the request and announced it."""


class Unwritten(Exception):
    """The template writes no such message."""


def call(arguments, name="abcdefghi"):
    """A call of the tool."""
    return {"id": name, "type": "function", "function": {"name": "paint_wall", "arguments": arguments}}


def calls(arguments):
    """A conversation with a call and its result."""
    return ASK + [{"role": "assistant", "content": "", "tool_calls": [call(arguments)]},
                  {"role": "tool", "tool_call_id": "abcdefghi", "name": "paint_wall", "content": "it is wet"},
                  {"role": "user", "content": "and now"}]


class Client:
    """Requests to a server. `notes` are lines of its log."""

    def __init__(self, url, notes):
        self.url, self.notes = url, notes

    def lost(self, capability, note, reason):
        """Reports a dropped part: raises Noted if the server announces it, or Failed."""
        with urllib.request.urlopen(self.url + "/props", timeout=120) as answer:
            capabilities = json.load(answer)["chat_template_caps"]
        said = any(note in line for line in self.notes) and capabilities.get(capability) is False
        raise (Noted if said else Failed)(reason)

    def post(self, path, body, read=json.load):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return read(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            if error.code == 400:
                raise Refused(json.loads(text)["error"]["message"]) from None
            raise Failed(f"status {error.code}: {text}") from None

    def arguments(self, message):
        """Requires that a call's arguments follow the schema, or that the server says that they may not."""
        try:
            of_schema(message["tool_calls"][0]["function"]["arguments"])
        except Failed as failure:
            self.lost("supports_argument_schemas", "may break the schemas", str(failure))
        return "ok"


class Cells(Client):
    """The kinds of requests, in the order of the columns. Each returns `ok` or `?`, or raises."""

    COLUMNS = ["plain", "tools", "required", "parallel", "schema", "both", "no_think", "history", "results",
               "content", "lists", "empty", "systems"]

    def rendered(self, *expected, **body):
        """Requires texts in the prompt."""
        prompt = self.post("/apply-template", body)["prompt"]
        for text in expected:
            if text not in prompt:
                raise Failed(f"'{text}' is not in the prompt")

    def choice(self, n, **body):
        fixed = {"messages": ASK, "temperature": 0, "max_tokens": n, "reasoning_budget_tokens": 4}
        answer = self.post("/v1/chat/completions", fixed | body)
        return answer["choices"][0], answer

    def answered(self, **body):
        """Requires a call of the tool where there are tools, or an answer by the schema. An answer that is cut before
        either needs a grammar that is in force: reasoning, and text before a call, are free."""
        choice, answer = self.choice(300, verbose=True, **body)
        message = choice["message"]
        if message.get("tool_calls"):
            return self.arguments(message)
        if choice["finish_reason"] == "length":
            settings = answer["__verbose"]["generation_settings"]
            if settings["grammar"] and not settings["grammar_lazy"]:
                return "?"
        elif "response_format" in body:
            of_schema(message["content"])
            return "ok"
        raise Failed(f"{choice['finish_reason']}: {message['content'][:100]!r}")

    def plain(self):
        self.rendered(HELLO, messages=ASK)
        self.choice(4)
        return "ok"

    def tools(self):
        self.rendered(HELLO, "paint_wall", messages=ASK, tools=[TOOL])
        self.choice(4, tools=[TOOL])
        return "ok"

    def required(self):
        return self.answered(tools=[TOOL], tool_choice="required")

    def parallel(self):
        self.choice(4, tools=[TOOL], parallel_tool_calls=True)
        choice, _ = self.choice(200, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        if len(choice["message"].get("tool_calls", [])) > 1:
            raise Failed("two calls where one is allowed")
        return "ok"

    def schema(self):
        return self.answered(response_format=FORMAT)

    def both(self):
        return self.answered(response_format=FORMAT, tools=[TOOL])

    def no_think(self):
        self.rendered(HELLO, messages=ASK, chat_template_kwargs={"enable_thinking": False})
        self.choice(4, chat_template_kwargs={"enable_thinking": False})
        return "ok"

    def history(self):
        """A colour that stands in the call alone."""
        messages = calls('{"colour": "mauve"}')[:3]
        self.rendered(HELLO, "it is wet", messages=messages, tools=[TOOL])
        try:
            self.rendered("mauve", messages=messages, tools=[TOOL])
        except Failed as failure:
            self.lost("supports_tool_calls", "loses its calls", str(failure))
        return "ok"

    def results(self):
        """A tool's result where the request has no tools."""
        self.rendered(HELLO, "it is wet", messages=calls('{"colour": "red"}')[:3])
        return "ok"

    def content(self):
        """Text beside a call."""
        messages = calls('{"colour": "red"}')[:3]
        messages[1]["content"] = WORDS
        self.rendered(HELLO, "it is wet", messages=messages, tools=[TOOL])
        try:
            self.rendered(WORDS, messages=messages, tools=[TOOL])
        except Failed as failure:
            self.lost("supports_content_with_calls", "loses its text", str(failure))
        return "ok"

    def lists(self):
        parts = [{"type": "text", "text": HELLO}, {"type": "text", "text": "jumps"}]
        self.rendered(HELLO, "jumps", messages=[{"role": "user", "content": parts}])
        messages = calls('{"colour": "red"}')
        messages[2]["content"] = [{"type": "text", "text": "it is wet"}]
        self.rendered("it is wet", messages=messages, tools=[TOOL])
        return "ok"

    def empty(self):
        try:
            self.rendered("it is wet", messages=calls("")[:3], tools=[TOOL])
        except Refused as refusal:
            if "arguments" in str(refusal):
                raise Failed(str(refusal)) from None
            raise
        return "ok"

    def systems(self):
        twice = [{"role": "system", "content": "be brief"}, {"role": "system", "content": "be kind"}]
        self.rendered("be brief", "be kind", HELLO, messages=twice + ASK)
        return "ok"


    def texts(self):
        """What the template writes for messages of the assistant's, by the names that Replays uses."""
        red, blue, green = (json.dumps({"colour": colour}) for colour in ("red", "blue", "green"))
        messages = {
            "call": {"content": "", "tool_calls": [call(red)]},
            "pair": {"content": "", "tool_calls": [call(red), call(blue, "ABCDEFGHI")]},
            "said": {"content": WORDS, "tool_calls": [call(red)]},
            "wrong": {"content": "", "tool_calls": [call(green)]},
            "words": {"content": WORDS},
            "typed": {"content": VALUE},
        }
        found = {}
        for name, message in messages.items():
            try:
                found[name] = self.text(message)
            except (Refused, Failed):
                pass
        # A model ends its turn with a token, which is no text.
        words = found.get("words") or ""
        ends = (words[words.rfind(WORDS) + len(WORDS):].strip(), *CALL_ENDS)
        found = {name: without_end(text, ends) for name, text in found.items() if text}
        # Some templates write text and call as two turns, which are no answer.
        if ends[0] and ends[0] in found.get("said", "").rpartition(WORDS)[2]:
            del found["said"]
        return found

    def text(self, message):
        tools = {} if message["content"] == VALUE else {"tools": [TOOL]}
        prompt = self.post("/apply-template", {"messages": ASK} | tools)["prompt"]
        histories = []
        for more in ({"reasoning_content": THOUGHT}, {}):
            messages = ASK + [{"role": "assistant"} | message | more]
            body = {"messages": messages, "add_generation_prompt": False} | tools
            histories.append(self.post("/apply-template", body)["prompt"])
        text = replay.answer(prompt, histories, THOUGHT)
        names = len(message.get("tool_calls", []))
        if text is None or message["content"] not in text or text.count("paint_wall") < names:
            return None
        # Parsers read content in front of calls.
        if names and text.find(message["content"]) > text.find("paint_wall"):
            return None
        return text


def parts(name, text):
    """The parts that have tokens of their own: grammars may want another text between thought and content."""
    at = max(text.find(WORDS), text.find(VALUE)) if name in ("words", "typed") else 0
    return [text[:at], text[at:]] if at > 1 else [text]


def without_end(text, ends):
    """Text of a message without the end of a turn."""
    for end in ends:
        text = text.rstrip().removesuffix(end)
    return text.rstrip()


class Replays(Client):
    """Requests to a model that says what the template writes: columns as in Cells."""

    COLUMNS = ["call", "forced", "pair", "said", "beside", "wrong", "words", "typed"]

    def __init__(self, url, notes, texts, written):
        super().__init__(url, notes)
        self.texts, self.written = texts, written

    def ask(self, name, **body):
        """The choice whose answer begins as text `name`, whole and put together from a stream."""
        if name not in self.texts.first:
            raise Unwritten("the template writes no such message, or not behind its prompt")
        body = {"messages": ASK, "temperature": 0, "max_tokens": 400, "logit_bias": self.texts.bias(name),
                "reasoning_budget_tokens": 64} | body
        whole = self.post("/v1/chat/completions", body)["choices"][0]
        streamed = self.post("/v1/chat/completions", body | {"stream": True}, joined)
        message = whole["message"]
        for field in ("content", "reasoning_content"):
            if (message.get(field) or "") != streamed[field]:
                raise Failed(f"{field} is {message.get(field)!r}, in a stream {streamed[field]!r}")
        functions = [own["function"] for own in message.get("tool_calls", [])]
        if functions != streamed["functions"] or whole["finish_reason"] != streamed["finish_reason"]:
            raise Failed(f"{whole}, in a stream {streamed}")
        return whole

    def said_again(self, name, colours, content="", **body):
        """Requires the message that the text is of."""
        choice = self.ask(name, **body)
        message = choice["message"]
        thought = THOUGHT if THOUGHT in self.written[name] else ""
        found = [(own["function"]["name"], value_of(own["function"]["arguments"]))
                 for own in message.get("tool_calls", [])]
        ids = {own["id"] for own in message.get("tool_calls", [])}
        expected = [("paint_wall", {"colour": colour}) for colour in colours]
        end = "tool_calls" if colours else "stop"
        is_same = (found == expected and len(ids) == len(found) and choice["finish_reason"] == end
                   and re.sub(TAG, "", message.get("content") or "").strip() == content
                   and message.get("reasoning_content", "").strip().endswith(thought))
        if not is_same:
            raise Failed(f"{self.written[name]!r} is read as {choice}")
        return "ok"

    def call(self):
        return self.said_again("call", ["red"], tools=[TOOL])

    def forced(self):
        return self.said_again("call", ["red"], tools=[TOOL], tool_choice="required")

    def pair(self):
        self.said_again("pair", ["red", "blue"], tools=[TOOL], parallel_tool_calls=True)
        message = self.ask("pair", tools=[TOOL], parallel_tool_calls=False)["message"]
        # Some grammars allow calls without end. The answer has the first.
        found = [value_of(own["function"]["arguments"]) for own in message.get("tool_calls", [])]
        if found != [{"colour": "red"}]:
            raise Failed(f"{found} where one call is allowed")
        return "ok"

    def said(self):
        return self.said_again("said", ["red"], WORDS, tools=[TOOL])

    def beside(self):
        return self.said_again("call", ["red"], tools=[TOOL], response_format=FORMAT)

    def wrong(self):
        """The model says a colour that the tool's schema does not allow."""
        message = self.ask("wrong", tools=[TOOL], tool_choice="required")["message"]
        if not message.get("tool_calls"):
            raise Failed(f"no call: {message}")
        return self.arguments(message)

    def words(self):
        return self.said_again("words", [], WORDS, tools=[TOOL])

    def typed(self):
        """Some grammars want JSON in another place than the template writes content, as in a fence."""
        choice = self.ask("typed", response_format=FORMAT)
        text = choice["message"].get("content") or ""
        if text.strip() == VALUE:
            return "ok"
        of_schema(text)
        return "kept"


def of_schema(text):
    try:
        value = json.loads(text.strip().removeprefix("```json").removesuffix("```"))
    except ValueError:
        raise Failed(f"not JSON: {text[:100]!r}") from None
    if value not in ({"colour": "red"}, {"colour": "blue"}):
        raise Failed(f"not by the schema: {text[:100]!r}")


def value_of(text):
    """A JSON value, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def joined(events):
    """The choice that the events of a stream give together."""
    whole = {"content": "", "reasoning_content": "", "functions": [], "finish_reason": None}
    for line in events:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise Failed(str(event))
        for choice in event["choices"]:
            delta = choice["delta"]
            for field in ("content", "reasoning_content"):
                whole[field] += delta.get(field) or ""
            for own in delta.get("tool_calls", []):
                if own["index"] == len(whole["functions"]):
                    whole["functions"].append({"name": "", "arguments": ""})
                for field, value in own["function"].items():
                    whole["functions"][own["index"]][field] += value
            whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
    return whole
