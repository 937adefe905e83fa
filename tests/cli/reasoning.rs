//! Reasoning before an answer.

use super::rig::*;

/// Opens reasoning, as Qwen3's newer templates do, unless `enable_thinking` is false.
const THINKS: &str = "{%- for message in messages -%}\
{{- message.role + ':\n' -}}\
{%- if message.role == 'assistant' and message.reasoning_content -%}\
{{- '<think>' + message.reasoning_content + '</think>' -}}\
{%- endif -%}\
{{- message.content + '\n' -}}\
{%- endfor -%}\
{%- if add_generation_prompt -%}\
{{- 'assistant:\n<think>' -}}\
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '</think>' -}}{%- endif -%}\
{%- endif -%}";

fn talk(flags: &[&str]) -> Ran {
    let plain = ["-st", "-p", "hello", "-n", "24", "--temp", "0", "--ignore-eos", "--no-display-prompt"];
    demo(&[&plain[..], &["--chat-template", THINKS], flags].concat()).run()
}

#[test]
fn reasoning_is_separate_and_ends_with_its_budget() {
    let ran = talk(&["--reasoning-budget", "4", "--reasoning-budget-message", " So."]).expect(0);
    let (heading, rest) = ran.stdout.split_once("\n\n").unwrap();
    assert_eq!(heading, "[Start thinking]", "{}", ran.stdout);
    let (reasoning, answer) = rest.split_once("[End thinking]\n\n").unwrap();
    assert!(reasoning.trim_end().ends_with(" So."), "{reasoning:?}");
    assert!(!answer.trim().is_empty() && !ran.stdout.contains("think>"), "{}", ran.stdout);

    let none = talk(&["--reasoning-budget", "0"]).expect(0).stdout;
    assert!(!none.contains("thinking]") && !none.contains("think>"), "{none}");
    let as_it_is = talk(&["--reasoning-budget", "4", "--skip-chat-parsing"]).expect(0).stdout;
    assert!(as_it_is.contains("</think>") && !as_it_is.contains("thinking]"), "{as_it_is}");
    let in_the_answer = talk(&["--reasoning-budget", "4", "--reasoning-format", "none"]).expect(0).stdout;
    assert!(in_the_answer.contains("</think>") && !in_the_answer.contains("thinking]"), "{in_the_answer}");
}

#[test]
fn thinking_is_left_out() {
    let off = talk(&["--reasoning", "off"]).expect(0).stdout;
    assert!(!off.contains("thinking]"), "{off}");
    let by_variable = talk(&["--chat-template-kwargs", "{\"enable_thinking\": false}"]).expect(0).stdout;
    assert_eq!(by_variable, off);
    assert!(talk(&["-rea", "on"]).expect(0).stdout.starts_with("[Start thinking]"));
    let text = talk(&["--chat-template-kwargs", "{\"enable_thinking\": \"no\"}"]).expect(1);
    assert!(text.stderr.contains("true or false"), "{}", text.stderr);
}
