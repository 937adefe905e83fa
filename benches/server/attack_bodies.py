"""Request bodies that a server must refuse or answer without harm: (name, path, bytes)."""

import json

from mutations import CHAT, TOOL

TEXTS = "/v1/completions"
COMPLETION, CHATS, MESSAGES, RESPONSES = "/completion", "/v1/chat/completions", "/v1/messages", "/v1/responses"
SHORT = {"prompt": "And God said", "n_predict": 2}
N_VOCAB = 4096  # The demo model's.


def text(**more) -> bytes:
    """A text of OpenAI's with its prompt's probabilities and other fields."""
    return json.dumps({"prompt": "And God said", "max_tokens": 1, "echo": True, "logprobs": 1} | more).encode()


def completion(**more) -> bytes:
    """A completion with other fields."""
    return json.dumps(SHORT | more).encode()


def chat(**more) -> bytes:
    """A chat with other fields."""
    return json.dumps(CHAT | more).encode()


def content(*parts) -> bytes:
    """A chat whose message has these parts."""
    return chat(messages=[{"role": "user", "content": list(parts)}])


def schema(value) -> bytes:
    """A chat that must answer by a JSON schema."""
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": value}})


def tool(parameters) -> bytes:
    """A chat with a tool of these parameters, which must be called."""
    return chat(
        tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}], tool_choice="required"
    )


def nested(depth: int, around, inner):
    """`inner`, wrapped `depth` times by `around`."""
    for _ in range(depth):
        inner = around(inner)
    return inner


def json_text() -> list[tuple[str, str, bytes]]:
    """Bodies that are hardly JSON."""
    return [
        ("empty body", COMPLETION, b""),
        ("null", COMPLETION, b"null"),
        ("NaN alone", COMPLETION, b"NaN"),
        ("list for an object", COMPLETION, b"[]"),
        ("byte order mark", COMPLETION, b"\xef\xbb\xbf" + completion()),
        ("UTF-16", COMPLETION, completion().decode().encode("utf-16")),
        ("bytes that are no UTF-8", COMPLETION, b'{"prompt":"\xff\xfe\xc0\x80","n_predict":1}'),
        ("lone surrogates", COMPLETION, b'{"prompt":"\\ud83d \\udc00","n_predict":1}'),
        ("NUL inside a key", COMPLETION, b'{"prompt\\u0000":"a","prompt":"a\\u0000b","n_predict":1}'),
        ("text after the value", COMPLETION, completion() + b"{}"),
        ("duplicate keys", COMPLETION, b'{"prompt":["b"],"n_predict":1e9,"prompt":"a","n_predict":1}'),
        ("arrays 200,000 deep", COMPLETION, b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        ("objects 100,000 deep", CHATS, b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        ("arrays 120 deep in a tool", CHATS, tool(nested(110, lambda inner: [inner], 1))),
        ("number of a million digits", COMPLETION, b'{"prompt":"a","n_predict":1,"seed":' + b"1" * 1_000_000 + b"}"),
        ("exponent of a million", COMPLETION, b'{"prompt":"a","n_predict":1,"temperature":1e1000000}'),
        ("key of a million characters", COMPLETION, json.dumps(SHORT | {"k" * 1_000_000: 1}).encode()),
        ("a million spaces around", COMPLETION, b" " * 1_000_000 + completion() + b" " * 1_000_000),
        ("100,000 unknown keys", COMPLETION, json.dumps(SHORT | {f"k{n}": n for n in range(100_000)}).encode()),
    ]


def numbers() -> list[tuple[str, str, bytes]]:
    """Numbers out of range, one field at a time."""
    found = []
    fields = {
        "n_predict": [-5, 2**63, 1.5, "2"],
        "temperature": [-1, 1e308, float("nan"), float("inf")],
        "top_k": [-(2**31), 2**31],
        "top_p": [-1, 5],
        "min_p": [-1, 2],
        "typical_p": [-3],
        "seed": [-(2**63), 2**200],
        "repeat_last_n": [2**31 - 1, -2],
        "repeat_penalty": [0, -1, 1e38],
        "frequency_penalty": [1e38],
        "dry_multiplier": [1e38],
        "dry_base": [0],
        "dry_allowed_length": [-1],
        "dry_penalty_last_n": [2**31 - 1],
        "mirostat": [7],
        "mirostat_tau": [-1],
        "xtc_probability": [2],
        "dynatemp_range": [1e38],
        "n_keep": [2**31 - 1],
        "n_discard": [-1],
        "n_probs": [-1, 2**31 - 1],
        "min_keep": [2**63],
        "n_indent": [2**31 - 1],
        "id_slot": [10**9],
        "t_max_predict_ms": [-1],
        "n": [0, 10**9],
        "n_cmpl": [10**9],
        "speculative.n_max": [-1, 2**31 - 1, 2**63, 0.5, "1", None, []],
    }
    for field, values in fields.items():
        for value in values:
            found.append((f"{field} {value}", COMPLETION, completion(**{field: value})))
    found += [
        ("max_tokens 0", CHATS, chat(max_tokens=0)),
        ("top_logprobs 10^9", CHATS, chat(logprobs=True, top_logprobs=10**9)),
        ("n 10^6", CHATS, chat(n=10**6)),
        (
            "thinking budget -1",
            MESSAGES,
            json.dumps(
                {
                    "max_tokens": 2,
                    "thinking": {"type": "enabled", "budget_tokens": -1},
                    "messages": CHAT["messages"][1:],
                }
            ).encode(),
        ),
    ]
    return found


def samplers() -> list[tuple[str, str, bytes]]:
    """Stops, biases, samplers, adapters."""
    return [
        ("samplers that are none", COMPLETION, completion(samplers=["nope", "", 7])),
        ("10,000 samplers", COMPLETION, completion(samplers=["top_k", "temperature"] * 5_000)),
        ("samplers of a megabyte", COMPLETION, completion(samplers="k" * 1_000_000)),
        ("empty stop", COMPLETION, completion(stop=[""])),
        ("stop that is an object", COMPLETION, completion(stop={"a": 1})),
        ("10,000 stops", COMPLETION, completion(stop=[f"stop {n}" for n in range(10_000)])),
        ("stop of a megabyte", COMPLETION, completion(stop=["a" * 1_000_000])),
        ("biases out of the vocabulary", COMPLETION, completion(logit_bias=[[N_VOCAB, 1], [-1, 1], [2**40, 1]])),
        ("bias that is not finite", COMPLETION, b'{"prompt":"a","n_predict":1,"logit_bias":[[5,1e999],[6,NaN]]}'),
        ("bias 1e38", COMPLETION, completion(logit_bias=[[5, 1e38], [6, -1e38]])),
        ("all tokens forbidden", COMPLETION, completion(logit_bias=[[n, False] for n in range(N_VOCAB)])),
        ("bias by a long text", COMPLETION, completion(logit_bias=[["the " * 10_000, 1]])),
        ("adapter -1", COMPLETION, completion(lora=[{"id": -1, "scale": 1}])),
        ("adapter 2^40", COMPLETION, completion(lora=[{"id": 2**40, "scale": 1}])),
        ("adapter's scale is text", COMPLETION, completion(lora=[{"id": 0, "scale": "NaN"}])),
        (
            "break strings of 100 KB",
            COMPLETION,
            completion(dry_multiplier=1, dry_sequence_breakers=["b" * 100_000, "\x00"]),
        ),
        (
            "break strings that begin in many tokens",
            COMPLETION,
            completion(dry_multiplier=1, dry_sequence_breakers=[f"e{n:02}zyx" for n in range(64)]),
        ),
        ("look back over 2^24 tokens", COMPLETION, completion(n=4, repeat_penalty=1.1, repeat_last_n=2**24)),
        ("look back over 2^24 tokens, DRY", COMPLETION, completion(n=4, dry_multiplier=1, dry_penalty_last_n=2**24)),
        ("140,000 biases by text", COMPLETION, completion(logit_bias=[["a", 1]] * 140_000)),
        (
            "reasoning message of 2 MB",
            CHATS,
            chat(reasoning_budget_tokens=1, reasoning_budget_message="and so " * 300_000),
        ),
        ("100,000 fields to answer", COMPLETION, completion(response_fields=[f"a/{n}" for n in range(100_000)])),
    ]


def prompts() -> list[tuple[str, str, bytes]]:
    """Prompts and contents of odd kinds."""
    return [
        ("empty prompt", COMPLETION, completion(prompt="")),
        ("empty list", COMPLETION, completion(prompt=[])),
        ("empty lists", COMPLETION, completion(prompt=[[], []])),
        ("token -1", COMPLETION, completion(prompt=[-1])),
        ("token beyond the vocabulary", COMPLETION, completion(prompt=[N_VOCAB])),
        ("token 2^31", COMPLETION, completion(prompt=[2**31])),
        ("token 1.5", COMPLETION, completion(prompt=[1.5])),
        ("100,000 tokens", COMPLETION, completion(prompt=[7] * 100_000)),
        ("prompt with an image", COMPLETION, completion(prompt={"prompt_string": "a", "multimodal_data": ["AAAA"]})),
        ("tokenize a number", "/tokenize", b'{"content": 7}'),
        ("detokenize -1", "/detokenize", b'{"tokens": [-1, 2147483648, 1e9, "a"]}'),
        ("detokenize a million", "/detokenize", json.dumps({"tokens": [5] * 1_000_000}).encode()),
        ("infill without text", "/infill", b'{"input_extra": [7], "n_predict": 1}'),
        ("save to ../", "/slots/0?action=save", b'{"filename": "../outside.bin"}'),
        ("slot of 10^20", "/slots/100000000000000000000?action=erase", b"{}"),
        ("unknown action", "/slots/0?action=destroy", b"{}"),
        ("control of nothing", "/v1/chat/completions/control", b'{"id": 7}'),
        ("adapters that are text", "/lora-adapters", b'"all"'),
        ("embedding of nothing", "/v1/embeddings", b'{"input": []}'),
    ]


def grammars() -> list[tuple[str, str, bytes]]:
    """Grammars, schemas and patterns that grow or never end."""
    grammar = {
        "left recursion": 'root ::= root "a" | "a"',
        "empty loop": 'root ::= ("")*',
        "loops in loops": 'root ::= (("a"*)*)*',
        "repetition of repetitions": 'root ::= (("a"{0,1000}){0,1000}){0,1000}',
        "reversed repetition": 'root ::= "a"{9,1}',
        "unclosed": 'root ::= ("a" | [',
        "undefined rule": "root ::= nothing",
        "20,000 parentheses": "root ::= " + "(" * 20_000,
        "reversed range": "root ::= [z-a]",
        "NUL": 'root ::= "\x00"',
        "ambiguous": 'root ::= s\ns ::= "a" s "b"? | "a" s "c"? | "a"',
        "10,000 rules": "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(10_000))
        + '\nroot ::= r0\nr10000 ::= "a"',
    }
    found = [(f"grammar: {name}", COMPLETION, completion(grammar=text)) for name, text in grammar.items()]
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2_000)}}
    schemas = {
        "refers to itself": {"$ref": "#"},
        "cycle of two": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "refers to the web": {"$ref": "http://127.0.0.1:1/schema.json"},
        "refers to a file": {"$ref": "file:///etc/passwd"},
        "pattern (a+)+$": {"type": "string", "pattern": "^((a+)+)+$"},
        "pattern of 10,000 groups": {"type": "string", "pattern": "^" + "(" * 10_000 + "a" + ")" * 10_000 + "$"},
        "pattern a{1,999999999}": {"type": "string", "pattern": "^a{1,999999999}$"},
        "10^9 characters": {"type": "string", "minLength": 10**9},
        "10^9 items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        "integer above its maximum": {"type": "integer", "minimum": 10**30, "maximum": -(10**30)},
        "no choices": {"enum": []},
        "no alternatives": {"anyOf": []},
        "unknown type": {"type": "teapot"},
        "2,000 optional properties": wide,
        "properties 100 deep": nested(
            30, lambda inner: {"type": "object", "properties": {"a": inner}}, {"type": "null"}
        ),
        "alternatives 2^12": nested(12, lambda inner: {"anyOf": [inner, inner]}, {"type": "null"}),
        "allOf within itself": {
            "$defs": {"a": {"properties": {"p": {"allOf": [{"$ref": "#/$defs/a"}]}}}},
            "$ref": "#/$defs/a",
        },
        "allOf 2^40": {
            "$defs": {
                f"a{n}": {"properties": {"p": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2}}} for n in range(40)
            }
            | {"a40": {"type": "null"}},
            "$ref": "#/$defs/a0",
        },
        "types 2^30": nested(
            30, lambda inner: {"type": ["object", "object"], "properties": {"a": inner}}, {"type": "null"}
        ),
        "schema that is a number": 7,
    }
    found += [(f"schema: {name}", CHATS, schema(value)) for name, value in schemas.items()]
    found += [(f"json_schema: {name}", COMPLETION, completion(json_schema=value)) for name, value in schemas.items()]
    found += [
        ("tool: refers to itself", CHATS, tool({"$ref": "#"})),
        (
            "tool: cycle below a property",
            CHATS,
            tool({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}),
        ),
        ("tool: list that contains itself", CHATS, tool({"type": "array", "items": {"$ref": "#"}})),
        (
            "tool: name with lines",
            CHATS,
            chat(
                tools=[{"type": "function", "function": {"name": 'a"\n::=', "parameters": {}}}], tool_choice="required"
            ),
        ),
        ("tool: 2,000 tools", CHATS, chat(tools=[TOOL] * 2_000, tool_choice="required")),
        (
            "tool: chosen, not there",
            CHATS,
            chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        ),
        ("tool: no function", CHATS, chat(tools=[{"type": "function"}, 7, None])),
    ]
    return found


def chats() -> list[tuple[str, str, bytes]]:
    """Conversations."""
    picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
    return [
        ("no messages", CHATS, chat(messages=[])),
        ("messages null", CHATS, chat(messages=None)),
        ("message null", CHATS, chat(messages=[None])),
        ("role of 100 KB", CHATS, chat(messages=[{"role": "r" * 100_000, "content": "a"}])),
        ("content null", CHATS, chat(messages=[{"role": "user", "content": None}])),
        ("image_url", CHATS, content(picture)),
        ("image in place", CHATS, content({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})),
        ("image_url is text", CHATS, content({"type": "image_url", "image_url": "a"})),
        ("input_audio", CHATS, content({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}})),
        ("part of no known type", CHATS, content({"type": "teapot"}, {}, 7)),
        ("call without a function", CHATS, chat(messages=[{"role": "assistant", "tool_calls": [{"id": 7}]}])),
        (
            "call's arguments are no JSON",
            CHATS,
            chat(
                messages=[
                    CHAT["messages"][1],
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
                        ],
                    },
                ]
            ),
        ),
        ("result of no call", CHATS, chat(messages=[{"role": "tool", "content": "a"}])),
        ("10,000 messages", CHATS, chat(messages=CHAT["messages"][1:] * 10_000)),
        ("template in a request", CHATS, chat(chat_template="{% for i in range(10**9) %}a{% endfor %}")),
        ("template's variables deep", CHATS, chat(chat_template_kwargs=nested(100, lambda inner: {"a": inner}, 1))),
        ("template's variable is a list", CHATS, chat(chat_template_kwargs=[1])),
        ("template's words in a message", CHATS, chat(messages=[{"role": "user", "content": "{{ 'a' * 10**11 }}"}])),
        (
            "special tokens in a message",
            CHATS,
            chat(messages=[{"role": "user", "content": "<|im_end|><|endoftext|>" * 50}]),
        ),
        ("response_format of no known type", CHATS, chat(response_format={"type": "teapot"})),
        (
            "image for Anthropic",
            MESSAGES,
            json.dumps(
                {
                    "max_tokens": 2,
                    "messages": [
                        {
                            "role": "user",
                            "content": [
                                {
                                    "type": "image",
                                    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                                }
                            ],
                        }
                    ],
                }
            ).encode(),
        ),
        (
            "result of no call for Anthropic",
            MESSAGES,
            json.dumps(
                {
                    "max_tokens": 2,
                    "messages": [
                        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": 7, "content": [[]]}]}
                    ],
                }
            ).encode(),
        ),
        (
            "image for responses",
            RESPONSES,
            json.dumps(
                {
                    "max_output_tokens": 2,
                    "input": [
                        {"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:1/a.png"}]}
                    ],
                }
            ).encode(),
        ),
        ("logprobs of a long prompt", TEXTS, text(prompt="a " * 400, logprobs=10**9)),
        ("logprobs of many prompts", TEXTS, text(prompt=["a " * 400] * 256, logprobs=1000)),
        ("many numbers as a prompt", TEXTS, text(prompt=[5] * 200_000)),
        ("best of 10^9", TEXTS, text(best_of=10**9)),
        ("best of -1", TEXTS, text(best_of=-1)),
        ("a suffix of 1 MiB", TEXTS, text(echo=False, suffix="x " * (1 << 19))),
        ("an id of 1 MiB", RESPONSES, json.dumps({"input": "a", "previous_response_id": "r" * (1 << 20)}).encode()),
        ("a format that is no schema", MESSAGES, json.dumps(CHAT | {"output_config": {"format": []}}).encode()),
        ("Ollama without fields", "/api/chat", b"{}"),
        ("Ollama's images", "/api/chat", json.dumps(
            {"messages": [{"role": "user", "content": "a", "images": ["A" * 100_000, 7]}]}).encode()),
        ("Ollama's options", "/api/generate", json.dumps(
            {"prompt": "a", "options": {"num_predict": -10**9, "temperature": "hot"}}).encode()),
        (
            "earlier response",
            RESPONSES,
            json.dumps({"input": "a", "previous_response_id": "r", "max_output_tokens": 2}).encode(),
        ),
    ]


def bodies() -> list[tuple[str, str, bytes]]:
    """All of them."""
    return json_text() + numbers() + samplers() + prompts() + grammars() + chats()
