#!/usr/bin/env python3
"""Real clients against a running server: the `openai` and the `anthropic` package.

    pip install openai anthropic
    ./clients.py --url http://127.0.0.1:8080 [--key KEY] [--embeddings-url http://127.0.0.1:8081]

What a model says is not judged, only what the packages make of the answers: they parse them into their own types, so a
missing field or a wrong order of events is an error. Prints a table; exits with 1 when a check failed.
"""

import argparse
import json
import sys
import time
import traceback

import anthropic
import openai

MESSAGES = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "In the beginning God created the heaven"},
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
OPENAI_TOOL = {
    "type": "function",
    "function": {"name": "plan_trip", "description": "Plans a trip", "parameters": SCHEMA},
}
ANTHROPIC_TOOL = {"name": "plan_trip", "description": "Plans a trip", "input_schema": SCHEMA}


class Checks:
    """One method per check, named `package_what`; what it returns is shown beside its name."""

    def __init__(self, options):
        common = {"api_key": options.key or "none", "max_retries": 0, "timeout": 300}
        self.openai = openai.OpenAI(base_url=options.url + "/v1", **common)
        self.anthropic = anthropic.Anthropic(base_url=options.url, **common)
        self.embeddings = None
        if options.embeddings_url:
            self.embeddings = openai.OpenAI(
                base_url=options.embeddings_url + "/v1", api_key=options.key or "none", max_retries=0, timeout=300
            )
        self.options = options
        self.model = self.openai.models.list().data[0].id

    def chat(self, **more):
        """A chat completion with what most checks share."""
        return self.openai.chat.completions.create(**{"model": self.model, "messages": MESSAGES, "max_tokens": 12,
                                                      "temperature": 0.0} | more)

    # --- openai ---

    def openai_models(self):
        models = self.openai.models.list().data
        assert len(models) == 1 and models[0].object == "model"
        return models[0].id

    def openai_chat(self):
        answer = self.chat()
        choice = answer.choices[0]
        assert choice.message.role == "assistant" and choice.message.content is not None
        assert choice.finish_reason in ("length", "stop")
        assert answer.usage.completion_tokens <= 12
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        return repr(choice.message.content)

    def openai_chat_stream(self):
        text, reasons, usage, ids = "", [], None, set()
        for chunk in self.chat(stream=True, stream_options={"include_usage": True}):
            ids.add(chunk.id)
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
            usage = chunk.usage or usage
        assert len(ids) == 1 and len(reasons) == 1, (ids, reasons)
        assert usage is not None and usage.completion_tokens <= 12
        assert text == self.chat().choices[0].message.content, "the stream says something else than the whole answer"
        return repr(text)

    def openai_chat_stream_helper(self):
        wanted = {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}
        with self.openai.chat.completions.stream(model=self.model, messages=MESSAGES, max_tokens=64, temperature=0.0,
                                                 response_format=wanted) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
        return final.choices[0].finish_reason

    def openai_chat_several(self):
        answer = self.chat(n=2, temperature=1.0, seed=7)
        assert [choice.index for choice in answer.choices] == [0, 1]
        return " / ".join(repr(choice.message.content) for choice in answer.choices)

    def openai_chat_logprobs(self):
        answer = self.chat(logprobs=True, top_logprobs=3)
        content = answer.choices[0].logprobs.content
        assert "".join(token.token for token in content) == answer.choices[0].message.content
        assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)
        return f"{len(content)} tokens"

    def openai_chat_stop(self):
        whole = self.chat(max_tokens=24).choices[0].message.content
        word = whole.split()[2]
        answer = self.chat(max_tokens=24, stop=[word]).choices[0]
        assert answer.finish_reason == "stop" and word not in answer.message.content
        return f"before {word!r}: {answer.message.content!r}"

    def openai_chat_seed(self):
        one, two = (self.chat(temperature=1.5, seed=11, max_tokens=24).choices[0].message.content for _ in range(2))
        other = self.chat(temperature=1.5, seed=12, max_tokens=24).choices[0].message.content
        assert one == two and one != other
        return "same seed, same text"

    def openai_chat_json_schema(self):
        wanted = {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}
        value = json.loads(self.chat(response_format=wanted, max_tokens=64).choices[0].message.content)
        assert value["city"] in ("Paris", "Rome") and value["days"] in (1, 2)
        return json.dumps(value)

    def openai_chat_json_schema_parsed(self):
        import pydantic

        class Trip(pydantic.BaseModel):
            city: str
            days: int

        wanted = {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}
        text = self.chat(response_format=wanted, max_tokens=64, stream=True)
        whole = "".join(chunk.choices[0].delta.content or "" for chunk in text if chunk.choices)
        return str(Trip.model_validate_json(whole))

    def openai_chat_json_object(self):
        text = self.chat(response_format={"type": "json_object"}, max_tokens=24).choices[0].message.content
        assert text.lstrip().startswith("{")
        return repr(text)

    def openai_chat_tools(self):
        answer = self.chat(tools=[OPENAI_TOOL], tool_choice="required", max_tokens=128).choices[0]
        return self.called(answer.message.tool_calls, answer.finish_reason)

    def openai_chat_tools_stream(self):
        names, arguments, reason = "", "", None
        for chunk in self.chat(tools=[OPENAI_TOOL], tool_choice="required", max_tokens=128, stream=True):
            if chunk.choices:
                for call in chunk.choices[0].delta.tool_calls or []:
                    assert call.index == 0
                    names += call.function.name or ""
                    arguments += call.function.arguments or ""
                reason = chunk.choices[0].finish_reason or reason
        if not names:
            assert reason == "length", reason
            return "no call: the model talked until the limit"
        assert names == "plan_trip" and json.loads(arguments)["city"] in ("Paris", "Rome")
        return arguments

    def called(self, calls, reason):
        """A tool call is well formed; a model that may talk before it need not come to it."""
        if not calls:
            assert reason == "length", f"no call, and finish_reason is {reason}"
            return "no call: the model talked until the limit"
        assert reason == "tool_calls" and calls[0].type == "function" and calls[0].function.name == "plan_trip"
        assert json.loads(calls[0].function.arguments)["days"] in (1, 2)
        return calls[0].function.arguments

    def openai_chat_tools_none(self):
        answer = self.chat(tools=[OPENAI_TOOL], tool_choice="none").choices[0]
        assert not answer.message.tool_calls
        return repr(answer.message.content)

    def openai_chat_tool_result(self):
        function = {"name": "plan_trip", "arguments": '{"city":"Rome","days":1}'}
        call = {"id": "c1", "type": "function", "function": function}
        history = [
            {"role": "user", "content": "Plan a trip."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "booked"},
        ]
        return repr(self.chat(messages=history, tools=[OPENAI_TOOL], max_tokens=8).choices[0].finish_reason)

    def openai_completions(self):
        answer = self.openai.completions.create(model=self.model, prompt="And God said", max_tokens=6, temperature=0.0)
        text = "".join(
            chunk.choices[0].text
            for chunk in self.openai.completions.create(
                model=self.model, prompt="And God said", max_tokens=6, temperature=0.0, stream=True)
        )
        assert text == answer.choices[0].text
        return repr(text)

    def openai_completions_list(self):
        answer = self.openai.completions.create(model=self.model, prompt=["And God said", "def main"], max_tokens=4)
        assert [choice.index for choice in answer.choices] == [0, 1]
        return " / ".join(repr(choice.text) for choice in answer.choices)

    def openai_responses(self):
        answer = self.openai.responses.create(
            model=self.model, input="And God said", max_output_tokens=8, temperature=0.0)
        assert answer.id.startswith("resp_") and answer.status in ("completed", "incomplete")
        assert answer.output_text
        return repr(answer.output_text)

    def openai_responses_stream(self):
        kinds, text = [], ""
        for event in self.openai.responses.create(model=self.model, input="And God said", max_output_tokens=8,
                                                  temperature=0.0, stream=True):
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds
        assert event.response.output_text == text
        return f"{len(kinds)} events, {text!r}"

    def openai_embeddings(self):
        if self.embeddings is None:
            return None
        answer = self.embeddings.embeddings.create(model=self.model, input=["And God said", "def main"])
        assert len(answer.data) == 2
        assert abs(sum(x * x for x in answer.data[0].embedding) - 1) < 1e-3
        return f"{len(answer.data[0].embedding)} dimensions"

    def openai_error_status(self):
        try:
            self.chat(temperature="hot")
        except openai.BadRequestError as error:
            return f"{error.status_code} {error.body['message']!r}"[:90]
        raise AssertionError("a temperature of \"hot\" was accepted")

    def openai_error_context(self):
        try:
            self.chat(messages=[{"role": "user", "content": "word " * 50_000}])
        except openai.BadRequestError as error:
            assert error.body["type"] == "exceed_context_size_error", error.body
            return f"{error.body['n_prompt_tokens']} of {error.body['n_ctx']} tokens"
        except openai.APIStatusError as error:
            assert error.status_code == 413, error
            return "413"
        raise AssertionError("50,000 words were accepted")

    def openai_wrong_key(self):
        if not self.options.key:
            return None
        try:
            openai.OpenAI(base_url=self.options.url + "/v1", api_key="wrong", max_retries=0).models.list()
        except openai.AuthenticationError as error:
            return str(error.status_code)
        raise AssertionError("a wrong key was accepted")

    def openai_cancel(self):
        """A stream that is closed early leaves the server free."""
        stream = self.chat(stream=True, max_tokens=100_000)
        for _ in zip(stream, range(3)):
            pass
        stream.close()
        start = time.monotonic()
        self.chat(max_tokens=1)
        return f"next answer after {1e3 * (time.monotonic() - start):.0f} ms"

    # --- anthropic ---

    def message(self, **more):
        """A message with what most checks share."""
        return self.anthropic.messages.create(**{"model": self.model, "max_tokens": 12, "messages": MESSAGES[1:],
                                                 "extra_body": {"temperature": 0.0}} | more)

    def anthropic_message(self):
        answer = self.message(system="You answer briefly.")
        assert answer.type == "message" and answer.role == "assistant"
        assert answer.content and answer.content[0].type == "text"
        assert answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens <= 12
        return repr(answer.content[0].text)

    def anthropic_stream(self):
        kinds = []
        with self.anthropic.messages.stream(model=self.model, max_tokens=12, messages=MESSAGES[1:],
                                            extra_body={"temperature": 0.0}) as stream:
            for event in stream:
                kinds.append(event.type)
            final = stream.get_final_message()
        order = [kind for kind in dict.fromkeys(kinds) if kind.startswith(("message", "content_block"))]
        assert order == ["message_start", "content_block_start", "content_block_delta", "content_block_stop",
                         "message_delta", "message_stop"], order
        assert final.content[0].text == self.message().content[0].text
        assert final.usage.output_tokens > 0
        return repr(final.content[0].text)

    def anthropic_count_tokens(self):
        counted = self.anthropic.messages.count_tokens(model=self.model, messages=MESSAGES[1:]).input_tokens
        usage = self.message(max_tokens=1).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0), (counted, usage)
        return f"{counted} tokens"

    def anthropic_stop_sequence(self):
        word = self.message(max_tokens=24).content[0].text.split()[2]
        answer = self.message(max_tokens=24, stop_sequences=[word])
        assert answer.stop_sequence == word
        return f"{answer.stop_reason}, {answer.stop_sequence!r}"

    def anthropic_tools(self):
        answer = self.message(tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}, max_tokens=128)
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            assert answer.stop_reason == "max_tokens", answer.stop_reason
            return "no call: the model talked until the limit"
        assert answer.stop_reason == "tool_use" and calls[0].name == "plan_trip" and calls[0].input["days"] in (1, 2)
        return json.dumps(calls[0].input)

    def anthropic_tools_stream(self):
        with self.anthropic.messages.stream(model=self.model, max_tokens=128, messages=MESSAGES[1:],
                                            extra_body={"temperature": 0.0}, tools=[ANTHROPIC_TOOL],
                                            tool_choice={"type": "any"}) as stream:
            final = stream.get_final_message()
        calls = [block for block in final.content if block.type == "tool_use"]
        assert calls or final.stop_reason == "max_tokens"
        return json.dumps(calls[0].input) if calls else "no call: the model talked until the limit"

    def anthropic_tool_result(self):
        history = [
            {"role": "user", "content": "Plan a trip."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "plan_trip",
                                               "input": {"city": "Rome", "days": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "booked"}]},
        ]
        return self.message(messages=history, tools=[ANTHROPIC_TOOL], max_tokens=8).stop_reason

    def anthropic_error(self):
        try:
            self.message(messages=[{"role": "user", "content": "word " * 50_000}])
        except anthropic.APIStatusError as error:
            assert error.status_code in (400, 413), error
            return str(error.status_code)
        raise AssertionError("50,000 words were accepted")

    def anthropic_wrong_key(self):
        if not self.options.key:
            return None
        try:
            anthropic.Anthropic(base_url=self.options.url, api_key="wrong", max_retries=0).messages.create(
                model=self.model, max_tokens=1, messages=MESSAGES[1:])
        except anthropic.AuthenticationError as error:
            return str(error.status_code)
        raise AssertionError("a wrong key was accepted")


def main() -> None:
    """Arguments, all checks, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key", help="what the server was given as --api-key")
    parser.add_argument("--embeddings-url", help="a server that was started with --embedding")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--trace", action="store_true", help="show where a check failed")
    options = parser.parse_args()
    checks = Checks(options)
    names = [name for name in Checks.__dict__ if name.startswith(("openai_", "anthropic_")) and options.only in name]
    failed = 0
    print(f"openai {openai.__version__}, anthropic {anthropic.__version__}, {options.url}\n")
    print("| check | | |\n| --- | --- | --- |")
    for name in names:
        try:
            said = getattr(checks, name)()
            verdict = "passed"
            if said is None:
                verdict, said = "not run", "needs an option"
        except Exception as failure:  # Whatever it is, it is this check's failure.
            failed += 1
            verdict, said = "**failed**", f"{type(failure).__name__}: {failure}"
            if options.trace:
                traceback.print_exc()
        text = " ".join(str(said).split())[:160].replace("|", "\\|").replace("<", "&lt;")
        print(f"| {name} | {verdict} | {text} |", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
