//! Templates, answers and hostile texts, without a model.

use std::ptr;

use super::*;

fn render_with(template: &str, jinja: bool, add_generation_prompt: bool) -> Result<String, Error> {
    let messages = [ChatMessage::new("system", "Be brief."), ChatMessage::new("user", "Hi")];
    let options = ChatOptions { template: Some(template.into()), jinja, add_generation_prompt };
    render(ptr::null(), &messages, &options)
}

#[test]
fn built_in_names() {
    let chatml = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n";
    let opened = format!("{chatml}<|im_start|>assistant\n");
    let llama3 = "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>\
                  <|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
                  <|start_header_id|>assistant<|end_header_id|>\n\n";
    for jinja in [true, false] {
        assert_eq!(render_with("chatml", jinja, true).unwrap(), opened, "jinja {jinja}");
        assert_eq!(render_with("chatml", jinja, false).unwrap(), chatml, "jinja {jinja}");
        assert_eq!(render_with("llama3", jinja, true).unwrap(), llama3, "jinja {jinja}");
    }
}

#[test]
fn jinja_texts() {
    let template = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}\
                    {% if add_generation_prompt %}[assistant: {% endif %}";
    assert_eq!(render_with(template, true, true).unwrap(), "[system: Be brief.][user: Hi][assistant: ");
    assert_eq!(render_with(template, true, false).unwrap(), "[system: Be brief.][user: Hi]");
}

#[test]
fn failures_are_errors() {
    for (template, jinja) in [
        ("{% for m in messages %}", true),
        ("{{ raise_exception('no system messages here') }}", true),
        ("a template that llama.cpp does not recognize", false),
        ("", true),
        ("nul \0", true),
    ] {
        let error = render_with(template, jinja, true).unwrap_err();
        assert!(matches!(error, Error::ChatTemplate(_)), "{template:?}: {error}");
    }
    let raised = render_with("{{ raise_exception('no system messages here') }}", true, true).unwrap_err();
    assert!(raised.to_string().contains("no system messages here"), "{raised}");
}

/// As Qwen3's: thoughts between tags, which an empty pair turns off.
const THINKS: &str = "{%- for message in messages -%}\
{{- '<|im_start|>' + message.role + '\n' -}}\
{%- if message.role == 'assistant' and message.reasoning_content -%}\
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}\
{%- endif -%}\
{{- message.content + '<|im_end|>\n' -}}\
{%- endfor -%}\
{%- if add_generation_prompt -%}\
{{- '<|im_start|>assistant\n' -}}\
{%- if enable_thinking is defined and enable_thinking is false -%}\
{{- '<think>\n\n</think>\n\n' -}}\
{%- endif -%}\
{%- endif -%}";

/// As gpt-oss': channels.
const CHANNELS: &str = "{%- for message in messages -%}\
{%- if message.role == 'assistant' -%}\
{%- if message.thinking -%}\
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' -}}\
{%- endif -%}\
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}\
{%- else -%}\
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}\
{%- endif -%}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}";

fn templates(text: &str) -> ChatTemplates {
    ChatTemplates::read(ptr::null(), Some(text)).unwrap()
}

fn one_message() -> ChatInputs {
    let messages = r#"[{"role": "user", "content": "Hi"}]"#.to_owned();
    ChatInputs { messages, ..ChatInputs::default() }
}

#[test]
fn trial() {
    for text in [THINKS, CHANNELS] {
        let templates = templates(text);
        eprintln!("{templates:?} thinking {}", templates.supports_thinking());
        for enable_thinking in [true, false] {
            let prompt = templates.apply(&ChatInputs { enable_thinking, ..one_message() }).unwrap();
            eprintln!("{prompt:#?}");
            for said in [
                "<think>\nhm\n</think>\n\nJa",
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Ja",
                "Ja",
                "<think>\nhm",
                "<|channel|>analysis<|message|>hm",
                "<|channel|>nonsense",
                " \n Ja \n",
                "<think>a</think>b<think>c</think>d",
                "",
            ] {
                eprintln!("{said:?} -> {:?}", prompt.parser.parse(said, false));
            }
        }
    }
    for entry in std::fs::read_dir("/tmp/peer/llama.cpp/models/templates").unwrap() {
        let path = entry.unwrap().path();
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        if !path.display().to_string().ends_with("jinja") {
            continue;
        }
        let started = std::time::Instant::now();
        match ChatTemplates::read(ptr::null(), Some(&text)) {
            Ok(templates) => {
                let made = started.elapsed();
                let tools = Some(r#"[{"type":"function","function":{"name":"get_time","description":"d","parameters":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}}]"#.to_owned());
                let started = std::time::Instant::now();
                match templates.apply(&ChatInputs { tools, ..one_message() }) {
                    Ok(prompt) => eprintln!(
                        "{}: {made:?} {:?} thinking {} {} {:?} stops {:?} lazy {:?} gen {:?} preserved {:?}",
                        path.display(),
                        started.elapsed(),
                        templates.supports_thinking(),
                        prompt.format,
                        prompt.thinking,
                        prompt.additional_stops,
                        prompt.grammar.as_ref().map(|g| (g.lazy, g.triggers.clone())),
                        prompt.generation_prompt,
                        prompt.preserved_tokens.len()
                    ),
                    Err(error) => eprintln!("{}: {error}", path.display()),
                }
            }
            Err(error) => eprintln!("{}: {error}", path.display()),
        }
    }
}
