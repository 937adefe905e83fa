//! Asking and answering.

use fantoccini::key::Key;
use serde_json::{Value, json};

use super::browser::Window;
use super::mock::Step::{Cut, End, Event, Gate, Hang, Raw, Refuse, Say, Think};
use super::{page, page_after};

const ANSWER: &str = ".message.assistant:last-child .content";

#[tokio::test]
async fn an_answer_streams_in_with_its_thoughts_and_figures() {
    page(Window::Desk, async |page| {
        let progress = json!({"choices": [], "prompt_progress": {"total": 20, "processed": 5, "cache": 0}});
        let thoughts = [Event(progress), Gate, Think("Hm, "), Think("well."), Gate];
        page.server.answer(thoughts.into_iter().chain([Say("First "), Gate, Say("second."), End]));
        page.ready().await;
        let browser = &page.browser;
        page.ask("Count, please.").await;
        browser.reads(".message.user .text", "Count, please.").await;
        browser.reads(".message.assistant .pending", "Reading the prompt: 5 of 20 tokens").await;
        page.server.open();
        browser.reads(".reasoning summary", "Thinking").await;
        browser.reads(".reasoning .text", "Hm, well.").await;
        page.server.open();
        browser.reads(ANSWER, "First ").await;
        assert_eq!(browser.value("document.querySelector('.message.assistant').ariaBusy").await, "true");
        page.server.open();
        page.answered().await;
        browser.reads(ANSWER, "First second.").await;
        assert_eq!(browser.value("document.querySelector('.message.assistant').ariaBusy").await, "false");
        browser.reads(".reasoning summary", "Thoughts").await;
        assert_eq!(browser.value("document.querySelector('.reasoning').open").await, false);
        assert_eq!(
            browser.text(".message.assistant .figures-line").await,
            "12 tokens · 8 tokens/s · prompt 30, 10 reused · read in 500 ms · 88 % hits · 3 MiB/token · \
             waited 250 ms for the disk"
        );
        let request = page.server.last_request();
        assert_eq!(request["messages"], json!([{"role": "user", "content": "Count, please."}]));
        assert_eq!((&request["stream"], &request["model"]), (&Value::Bool(true), &json!("tiny")));
        assert_eq!(request["stream_options"], json!({"include_usage": true}));
        // What was not set is the server's to decide.
        for name in ["temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "chat_template_kwargs"] {
            assert!(request.get(name).is_none(), "{name}");
        }
    })
    .await;
}

#[tokio::test]
async fn stop_ends_the_request_and_keeps_what_there_is() {
    page(Window::Desk, async |page| {
        page.ready().await;
        let browser = &page.browser;
        for by_key in [true, false] {
            page.server.answer([Say("So far"), Hang]);
            page.ask("Go on.").await;
            browser.reads(ANSWER, "So far").await;
            if by_key {
                browser.keys(&char::from(Key::Escape).to_string()).await;
            } else {
                browser.click("#stop").await;
            }
            page.server.client_gone().await;
            page.answered().await;
            browser.reads(ANSWER, "So far").await;
            browser.says(".message.assistant:last-child footer", "Stopped.").await;
        }
        // The next request has what there was.
        page.server.answer([Say("Again."), End]);
        page.ask("And now?").await;
        page.answered().await;
        let messages = page.server.last_request()["messages"].clone();
        assert_eq!(messages.as_array().unwrap().len(), 5);
        assert_eq!(messages[1], json!({"role": "assistant", "content": "So far"}));
    })
    .await;
}

#[tokio::test]
async fn the_last_answer_is_regenerated_and_the_last_message_edited() {
    page(Window::Desk, async |page| {
        page.ready().await;
        let browser = &page.browser;
        for (question, answer) in [("One?", "Uno."), ("Two?", "Due.")] {
            page.server.answer([Say(answer), End]);
            page.ask(question).await;
            browser.reads(ANSWER, answer).await;
            page.answered().await;
        }
        page.server.answer([Say("Zwei."), End]);
        page.act("Regenerate").await;
        browser.reads(ANSWER, "Zwei.").await;
        page.answered().await;
        let asked = |content: &[&str]| {
            let roles = ["user", "assistant"].into_iter().cycle();
            Value::Array(roles.zip(content).map(|(role, content)| json!({"role": role, "content": content})).collect())
        };
        assert_eq!(page.server.last_request()["messages"], asked(&["One?", "Uno.", "Two?"]));

        // Changed and given up: nothing is asked.
        page.act("Edit").await;
        browser.keys(" Not this.").await;
        browser.keys(&char::from(Key::Escape).to_string()).await;
        browser.until("!document.querySelector('.edit')").await;
        page.server.answer([Say("Tre."), End]);
        page.act("Edit").await;
        browser.find(".edit textarea").await.clear().await.unwrap();
        browser.find(".edit textarea").await.send_keys("Three?").await.unwrap();
        browser.click(".edit .primary").await;
        browser.reads(ANSWER, "Tre.").await;
        page.answered().await;
        assert_eq!(page.server.requests().len(), 4);
        assert_eq!(page.server.last_request()["messages"], asked(&["One?", "Uno.", "Three?"]));
        assert_eq!(browser.value("document.querySelectorAll('.message').length").await, 4);
        // Only what is last can be asked anew.
        assert_eq!(browser.value("document.querySelectorAll('.message footer').length").await, 4);
        assert_eq!(actions(page).await, ["Copy", "Copy", "Copy", "Edit", "Copy", "Regenerate"]);
    })
    .await;
}

async fn actions(page: &super::Page) -> Vec<Value> {
    let names =
        page.browser.value("[...document.querySelectorAll('footer button')].map((button) => button.textContent)").await;
    names.as_array().unwrap().clone()
}

/// Text that would do something were it HTML.
const HOSTILE: &str = "<img src=x onerror=\"window.harmed=1\"><script>window.harmed=1</script><b onclick=1>b</b>";
const HOSTILE_MARKUP: &str = "\
# <svg onload=window.harmed=1>

`<script>window.harmed=1</script>` **<img src=x onerror=window.harmed=1>** [link](javascript:window.harmed=1)

```<script>
</code></pre><script>window.harmed=1</script>
```
";
const MADE_OF_TEXT: &str = "[...document.querySelectorAll('#messages, #list')]
    .flatMap((one) => [...one.querySelectorAll('img, script, svg, b, a, iframe, style, [onclick]')]).length";

#[tokio::test]
async fn no_text_becomes_html() {
    page(Window::Desk, async |page| {
        page.ready().await;
        let browser = &page.browser;
        let tool = json!({"choices": [{"index": 0, "delta": {"tool_calls": [
            {"index": 0, "id": "1", "function": {"name": HOSTILE, "arguments": "{\"a\": "}},
        ]}}]});
        let rest = json!({"choices": [{"index": 0, "delta": {"tool_calls": [
            {"index": 0, "function": {"arguments": "\"<script>1</script>\"}"}},
        ]}}]});
        let failure = json!({"error": {"message": HOSTILE, "type": "server_error", "code": 500}});
        let text = [Think(HOSTILE), Say(HOSTILE), Say("\n\n"), Say(HOSTILE_MARKUP)];
        page.server.answer(text.into_iter().chain([Event(tool), Event(rest), Event(failure)]));
        page.ask(HOSTILE).await;
        page.answered().await;
        browser.reads(".message.assistant .error", HOSTILE).await;
        browser.reads(".message.user .text", HOSTILE).await;
        browser.reads(".reasoning .text", HOSTILE).await;
        browser.reads(".calls code", &format!("{HOSTILE}({{\"a\": \"<script>1</script>\"}})")).await;
        browser.reads(&format!("{ANSWER} > p"), HOSTILE).await;
        browser.reads(&format!("{ANSWER} .heading"), "<svg onload=window.harmed=1>").await;
        browser.reads(&format!("{ANSWER} pre code"), "</code></pre><script>window.harmed=1</script>").await;
        browser.reads(&format!("{ANSWER} .caption span"), "<script>").await;
        // The name in the list, too, and after it was read from storage.
        browser.says("#list .open", "<img src=x").await;
        page.reload().await;
        browser.reads(".message.user .text", HOSTILE).await;
        assert_eq!(browser.value(MADE_OF_TEXT).await, 0);
        assert_eq!(browser.value("window.harmed ?? null").await, Value::Null);
    })
    .await;
}

#[tokio::test]
async fn what_goes_wrong_is_said_with_the_answer() {
    page(Window::Desk, async |page| {
        page.ready().await;
        let browser = &page.browser;
        let error =
            |code: u16, message: &str| json!({"error": {"code": code, "message": message, "type": "some_error"}});
        let lost = "The connection was lost before the answer's end.";
        let cases = [
            (vec![Refuse(400, error(400, "the prompt is too long"))], "", "the prompt is too long"),
            (vec![Refuse(502, json!("not an object"))], "", "not an object"),
            (vec![Say("Some"), Event(error(500, "the disk is gone"))], "Some", "the disk is gone"),
            (vec![Say("Some"), Gate, Cut], "Some", lost),
            // The end of a stream that does not say that it is the end.
            (vec![Say("Some")], "Some", lost),
            (vec![Say("Some"), Raw("data: {oops\n\n")], "Some", "The server sent an event that is not JSON."),
        ];
        let failures = cases.len();
        for (steps, text, expected) in cases {
            // A gate that is opened where there is none would be open for the next.
            let has_gate = steps.iter().any(|step| matches!(step, Gate));
            page.server.answer(steps);
            page.ask("Hello?").await;
            browser.reads(ANSWER, text).await;
            if has_gate {
                page.server.open();
            }
            browser.reads(".message.assistant:last-child .error", expected).await;
            page.answered().await;
        }
        let (half, rest) = ("data: {\"choices\":[{\"delta\":{\"content\":\"Bet", "ter.\"}}]}\r");
        page.server.answer([Raw(": still here\r\n\r\n"), Raw(half), Raw(rest), Raw("\n\r\n"), End]);
        page.act("Regenerate").await;
        browser.reads(ANSWER, "Better.").await;
        page.answered().await;
        assert_eq!(browser.value("document.querySelectorAll('.error:not([hidden])').length").await, failures - 1);
    })
    .await;
}

#[tokio::test]
async fn settings_are_sent_as_they_are_and_wrong_ones_are_not() {
    page(Window::Desk, async |page| {
        page.ready().await;
        let browser = &page.browser;
        browser.click("#show-settings").await;
        assert_eq!(browser.value("document.querySelector('[name=temperature]').placeholder").await, "0.8");
        for (name, value) in [
            ("temperature", "0.25"),
            ("top_k", "7"),
            ("top_p", "0.9"),
            ("min_p", "0"),
            ("max_tokens", "64"),
            ("seed", "3"),
        ] {
            browser.find(&format!("[name={name}]")).await.send_keys(value).await.unwrap();
        }
        browser.find("[name=thinking]").await.select_by_value("off").await.unwrap();
        browser.find("#system").await.send_keys("Be brief.").await.unwrap();
        page.server.answer([Say("Yes."), End]);
        page.ask("Brief?").await;
        page.answered().await;
        let request = page.server.last_request();
        let expected = json!({
            "model": "tiny", "stream": true, "stream_options": {"include_usage": true}, "return_progress": true,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Brief?"}],
            "temperature": 0.25, "top_k": 7, "top_p": 0.9, "min_p": 0, "max_tokens": 64, "seed": 3,
            "chat_template_kwargs": {"enable_thinking": false},
        });
        assert_eq!(request, expected);

        // They are there after a reload; a number that is none is told and not sent.
        page.reload().await;
        assert_eq!(browser.value("document.querySelector('[name=top_k]').value").await, "7");
        browser.find("[name=top_k]").await.send_keys(".5").await.unwrap();
        page.ask("And now?").await;
        browser.says("#notice-text", "top_k: ").await;
        assert_eq!(browser.value("document.activeElement.name").await, "top_k");
        assert_eq!(page.server.requests().len(), 1);
        assert_eq!(browser.value("document.getElementById('input').value").await, "And now?");
    })
    .await;
}

#[tokio::test]
async fn a_key_is_asked_for_and_not_kept_past_the_tab() {
    page_after(
        Window::Desk,
        |server| server.set_key("s3cret"),
        async |page| {
            let browser = &page.browser;
            browser.says("#notice-text", "This server wants an API key.").await;
            browser.click("#notice-action").await;
            browser.until("document.activeElement.id === 'key'").await;
            browser.keys("s3cret").await;
            browser.keys(&char::from(Key::Enter).to_string()).await;
            page.ready().await;
            page.server.answer([Say("Welcome."), End]);
            page.ask("Let me in.").await;
            browser.reads(ANSWER, "Welcome.").await;
            page.answered().await;
            page.reload().await;
            assert_eq!(
                browser.value("Object.values(localStorage).some((kept) => kept.includes('s3cret'))").await,
                false
            );
            assert_eq!(browser.value("sessionStorage.getItem('hobbit.key')").await, "s3cret");
            // A wrong one is told with the answer.
            browser.click("#key").await;
            browser.keys("x\u{e007}").await;
            page.ask("And with this?").await;
            browser.reads(".message.assistant:last-child .error", "Invalid API Key").await;
            browser.says("#notice-text", "This server wants an API key.").await;
        },
    )
    .await;
}

#[tokio::test]
async fn a_model_that_is_being_loaded_is_waited_for() {
    page_after(
        Window::Desk,
        |server| server.set_loading(true),
        async |page| {
            let browser = &page.browser;
            browser.reads("#status", "loading the model").await;
            page.ask("Ready?").await;
            browser.reads("#notice-text", "The model is still being loaded.").await;
            assert_eq!(browser.value("document.getElementById('input').value").await, "Ready?");
            page.server.set_loading(false);
            page.ready().await;
            browser.reads("#status", "").await;
            page.server.answer([Say("Yes."), End]);
            browser.click("#send").await;
            browser.reads(ANSWER, "Yes.").await;
            page.answered().await;
        },
    )
    .await;
}

#[tokio::test]
async fn everything_goes_by_keys() {
    page(Window::Desk, async |page| {
        page.ready().await;
        let browser = &page.browser;
        assert_eq!(browser.value("document.activeElement.id").await, "input");
        page.server.answer([Say("Two lines."), End]);
        browser.keys("One").await;
        let [shift, enter, null] = [Key::Shift, Key::Enter, Key::Null].map(char::from);
        browser.keys(&format!("{shift}{enter}{null}Two{enter}")).await;
        browser.reads(".message.user .text", "One\nTwo").await;
        page.answered().await;
        assert_eq!(browser.value("document.getElementById('input').value").await, "");
        // An empty message is none.
        browser.keys(&format!(" {enter}")).await;
        browser.chord(Key::Control, 'k').await;
        browser.until("document.querySelectorAll('.message').length === 0").await;
        assert_eq!(browser.value("document.activeElement.id").await, "input");
        assert_eq!(page.server.requests().len(), 1);

        // Tab reaches all that can be pressed, in the order in which it stands, and where it is can be seen.
        let reached = browser
            .value(
                "[...document.querySelectorAll('a, button, input, select, textarea, canvas')]
                .filter((one) => one.checkVisibility() && !one.disabled).map((one) => one.id || one.textContent)",
            )
            .await;
        browser.value("document.querySelector('.skip').focus()").await;
        let mut order = Vec::new();
        for _ in 0..reached.as_array().unwrap().len() {
            order.push(browser.value("document.activeElement.id || document.activeElement.textContent").await);
            let outline = browser.value("getComputedStyle(document.activeElement).outlineStyle").await;
            assert_ne!(outline, "none", "{:?}", order.last());
            browser.keys(&char::from(Key::Tab).to_string()).await;
        }
        assert_eq!(Value::Array(order), reached);
    })
    .await;
}
