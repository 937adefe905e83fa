"""Good bodies for every endpoint, and random changes of them."""

import copy
import json
import random

CHAT = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    "max_tokens": 3,
    "temperature": 0.5,
}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "enum": ["x", "y"]}}, "required": ["a"]}}}

# Bodies that are answered well: (method, path, body).
SEEDS = [
    ("POST", "/completion", {
        "prompt": "And God said", "n_predict": 3, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1,
        "seed": 1,
        "repeat_penalty": 1.1, "repeat_last_n": 16, "presence_penalty": 0.1, "frequency_penalty": 0.1, "mirostat": 0,
        "mirostat_tau": 5.0, "mirostat_eta": 0.1, "typical_p": 1.0, "dry_multiplier": 0.5, "dry_base": 1.75,
        "dry_allowed_length": 2, "dry_sequence_breakers": ["\n"], "xtc_probability": 0.1, "xtc_threshold": 0.1,
        "dynatemp_range": 0.1, "n_keep": 1, "n_discard": 1, "stop": ["END"], "stream": False, "n_probs": 2,
        "post_sampling_probs": False, "cache_prompt": True, "id_slot": -1, "ignore_eos": False, "return_tokens": True,
        "samplers": ["top_k", "temperature"], "response_fields": ["content"], "logit_bias": [[5, 1.0], ["the", False]],
        "timings_per_token": True, "return_progress": True, "t_max_predict_ms": 1000, "n_indent": 0, "min_keep": 0,
        "speculative.n_max": 4}),
    ("POST", "/completion", {"prompt": "And", "n_predict": 3, "stream": True, "n_probs": 1}),
    ("POST", "/completion", {"prompt": [1, 2, "text", 3], "n_predict": 2, "grammar": 'root ::= "a" | [b-z]+'}),
    ("POST", "/completion", {"prompt": ["a", [4, 5]], "n_predict": 2, "json_schema": {"type": "integer"}}),
    ("POST", "/completion", {"prompt": {"prompt_string": "a"}, "n_predict": 1, "lora": []}),
    ("POST", "/v1/completions", {"prompt": "And", "max_tokens": 3, "logprobs": 2, "n": 1, "echo": True, "stop": "x"}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}),
    ("POST", "/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "schema": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}},
                                "required": ["a"]}}}}),
    ("POST", "/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}, "logprobs": True,
                                              "top_logprobs": 2, "n": 2, "reasoning_effort": "low",
                                              "chat_template_kwargs": {"enable_thinking": True}}),
    ("POST", "/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
                                "instructions": "Be brief.", "max_output_tokens": 3, "tools": [], "stream": False}),
    ("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 3, "stream": True}),
    ("POST", "/v1/messages", {"model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "s"}],
                               "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
                               "tools": [{"name": "f", "input_schema": TOOL["function"]["parameters"]}],
                               "tool_choice": {"type": "auto"}, "stop_sequences": ["x"], "thinking": {
                                   "type": "enabled", "budget_tokens": 8}, "metadata": {"user_id": "u"}}),
    ("POST", "/v1/messages", {"model": "m", "max_tokens": 3, "stream": True, "messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "x"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "b"}]}]}),
    ("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/v1/chat/completions/input_tokens", CHAT),
    ("POST", "/v1/responses/input_tokens", {"input": "a"}),
    ("POST", "/tokenize", {"content": "And God said", "add_special": True, "parse_special": True, "with_pieces": True}),
    ("POST", "/detokenize", {"tokens": [1, 2, 3]}),
    ("POST", "/apply-template", CHAT | {"add_generation_prompt": True}),
    ("POST", "/markdown", {"text": "# a\n\n$x^2$\n\n```c\nint b;\n```\n"}),
    ("POST", "/v1/embeddings", {"input": ["a", [1, 2]], "encoding_format": "float"}),
    ("POST", "/embedding", {"content": "a"}),
    ("POST", "/infill", {"input_prefix": "a", "input_suffix": "b", "prompt": "c", "n_predict": 2, "input_extra": [
        {"filename": "f", "text": "t"}]}),
    ("POST", "/v1/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1}),
    ("POST", "/slots/0?action=save", {"filename": "a.bin"}),
    ("POST", "/slots/0?action=restore", {"filename": "a.bin"}),
    ("POST", "/slots/1?action=erase", {}),
    ("POST", "/lora-adapters", [{"id": 0, "scale": 0.5}]),
    ("POST", "/props", {}),
    ("GET", "/health", None),
    ("GET", "/props", None),
    ("GET", "/slots", None),
    ("GET", "/metrics", None),
    ("GET", "/v1/models", None),
    ("GET", "/lora-adapters", None),
    ("GET", "/", None),
]

# Replacements for any value.
VALUES = [
    None, True, False, 0, -1, 1, 2, 3, -2, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53, 2**63, 2**64,
    -(2**63) - 1, 10**30, 0.0, -0.0, 1e-45, 1e308, -1e308, 0.5, "", " ", "a", "0", "-1", "NaN",
    "\x00", "\ud83d", "\ufffd", "\u202e", "é" * 50,
    "a" * 5000, "../../etc/passwd", "{{ 1 / 0 }}", "{% for i in range(10**9) %}{% endfor %}", "<|endoftext|>",
    "root ::= root",
    [], [[]], {}, [None], [{}], {"": {}}, ["a", 1, None], [[[[[[[[]]]]]]]], {"type": "object"}, {"$ref": "#"},
    {"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/a"}}},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "minLength": 10**9}, {"type": "array", "minItems": 10**9}, {"enum": []}, {"anyOf": []},
    'root ::= "a"{1000000}', "root ::= (((((", 'root ::= [', "\\", "[1,2", "data:image/png;base64,AAAA",
    "http://127.0.0.1:1/",
]


def paths(value, at=()):
    """Paths of the values of a body."""
    yield at
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*at, key))
    elif isinstance(value, list):
        for number in range(len(value)):
            yield from paths(value[number], (*at, number))


def mutated(body, rng: random.Random):
    """A body with one to four changes."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 1, 2, 2, 4])):
        at = rng.choice(list(paths(body)))
        if not at:
            if rng.random() < 0.1:
                body = copy.deepcopy(rng.choice(VALUES))
            continue
        holder = body
        for key in at[:-1]:
            holder = holder[key]
        act = rng.random()
        if act < 0.6:
            holder[at[-1]] = copy.deepcopy(rng.choice(VALUES))
        elif act < 0.75:
            del holder[at[-1]]
        elif act < 0.85 and isinstance(holder, dict):
            other = rng.choice([key for _, _, seed in SEEDS if isinstance(seed, dict) for key in seed])
            holder[other] = copy.deepcopy(rng.choice(VALUES))
        elif act < 0.95 and isinstance(holder[at[-1]], list):
            holder[at[-1]] = holder[at[-1]] * rng.choice([2, 10, 300])
        elif isinstance(holder[at[-1]], str):
            holder[at[-1]] = holder[at[-1]] * rng.choice([0, 2, 100])
        elif isinstance(holder[at[-1]], (int, float)):
            holder[at[-1]] = holder[at[-1]] * rng.choice([-1, 0, 10, 1000])
    return body


def written(body, rng: random.Random) -> bytes:
    """The bytes of a body, now and then damaged."""
    raw = json.dumps(body, allow_nan=True).encode()
    act = rng.random()
    if act < 0.80 or not raw:
        return raw
    if act < 0.85:
        return raw[: rng.randrange(len(raw))]
    if act < 0.92:
        damaged = bytearray(raw)
        for _ in range(rng.choice([1, 2, 8])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return bytes(damaged)
    if act < 0.94:
        return raw.replace(b'"n_predict": 3', b'"n_predict": 3, "n_predict": 1e400', 1)
    if act < 0.96:
        depth = rng.choice([64, 1000, 200_000])
        return b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"
    if act < 0.98:
        return raw + rng.choice([b"\x00", b"{}", b" " * 10_000, b"\xff\xfe"])
    return rng.choice([b"", b"null", b"NaN", b'"a"', b"[]", b"\xef\xbb\xbf{}", b"a=b&c=d"])
