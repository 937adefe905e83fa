//! What the browser keeps.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use super::browser::{Browser, Window};
use super::mock::Step::{End, Hang, Say};
use super::page;

async fn titles(browser: &Browser) -> Value {
    browser.value("[...document.querySelectorAll('#list .open')].map((one) => one.textContent)").await
}

#[tokio::test]
async fn conversations_survive_a_reload_are_renamed_and_deleted() {
    page(Window::Desk, async |page| {
        page.ready().await;
        let browser = &page.browser;
        for (question, answer) in [("About hobbits?", "They are small."), ("About dragons?", "They are not.")] {
            browser.click("#new").await;
            page.server.answer([Say(answer), End]);
            page.ask(question).await;
            browser.reads(".message.assistant .content", answer).await;
            page.answered().await;
        }
        page.reload().await;
        assert_eq!(titles(browser).await, json!(["About dragons?", "About hobbits?"]));
        // The one that was open is open again, with its figures.
        browser.reads(".message.assistant .content", "They are not.").await;
        browser.says(".message.assistant footer", "12 tokens").await;
        browser.click("#list li:nth-child(2) .open").await;
        browser.reads(".message.assistant .content", "They are small.").await;

        browser.value("document.querySelector('#list li:nth-child(2) .tools button').focus()").await;
        browser.click("#list li:nth-child(2) .tools button").await;
        // The name is selected: what is typed replaces it.
        browser.until("document.activeElement === document.querySelector('#list input')").await;
        browser.keys("Small folk\u{e007}").await;
        browser.until("!document.querySelector('#list input')").await;
        assert_eq!(titles(browser).await, json!(["About dragons?", "Small folk"]));

        browser.value("document.querySelector('#list li:nth-child(2) .tools button').focus()").await;
        browser.click("#list li:nth-child(2) .tools button:last-child").await;
        browser.reads("#notice-text", "Deleted: Small folk.").await;
        assert_eq!(titles(browser).await, json!(["About dragons?"]));
        browser.until("document.querySelectorAll('.message').length === 0").await;
        browser.click("#notice-action").await;
        page.reload().await;
        assert_eq!(titles(browser).await, json!(["About dragons?", "Small folk"]));
    })
    .await;
}

#[tokio::test]
async fn what_is_exported_can_be_imported() {
    page(Window::Desk, async |page| {
        page.ready().await;
        let browser = &page.browser;
        page.server.answer([Say("Kept."), End]);
        page.ask("Keep this.").await;
        page.answered().await;
        browser.click("#export").await;
        let saved = async {
            loop {
                let files = browser.downloads.path().read_dir().unwrap();
                let mut paths = files.map(|entry| entry.unwrap().path());
                // It is there before it has anything in it.
                let complete = |path: &PathBuf| {
                    let text = path.extension().filter(|&end| end == "json").and_then(|_| std::fs::read(path).ok());
                    text.is_some_and(|text| serde_json::from_slice::<Value>(&text).is_ok())
                };
                if let Some(path) = paths.find(complete) {
                    return path;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let path = tokio::time::timeout(Duration::from_secs(60), saved).await.expect("a file is saved");
        let file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(file["hobbit_conversations"], 1);
        assert_eq!(file["conversations"][0]["messages"][1]["content"], "Kept.");

        let import = async |path: &Path| {
            browser.find("#import-file").await.send_keys(path.to_str().unwrap()).await.unwrap();
        };
        import(&path).await;
        browser.reads("#notice-text", "Nothing in the file is new.").await;
        browser.value("localStorage.clear()").await;
        page.load().await;
        page.ready().await;
        assert_eq!(titles(browser).await, json!([]));
        import(&path).await;
        browser.reads("#notice-text", "Imported: 1.").await;
        page.reload().await;
        assert_eq!(titles(browser).await, json!(["Keep this."]));

        for (name, text, expected) in [
            ("words.json", "no JSON".to_owned(), "Not imported: The file is not JSON."),
            (
                "other.json",
                "{}".to_owned(),
                "Not imported: The file has no conversations of this page (hobbit_conversations is missing).",
            ),
            (
                "newer.json",
                r#"{"hobbit_conversations": 2, "conversations": []}"#.to_owned(),
                "Not imported: The file's version is 2; this page reads 1.",
            ),
            (
                "broken.json",
                file.to_string().replace("\"assistant\"", "\"wizard\""),
                "Not imported: Conversation 1 of the file: a message's role is missing or of the wrong type.",
            ),
        ] {
            let path = browser.downloads.path().join(name);
            std::fs::write(&path, text).unwrap();
            import(&path).await;
            browser.reads("#notice-text", expected).await;
        }
        assert_eq!(titles(browser).await, json!(["Keep this."]));
    })
    .await;
}

#[tokio::test]
async fn an_answer_that_a_reload_cut_off_is_kept_and_says_so() {
    page(Window::Desk, async |page| {
        page.ready().await;
        let browser = &page.browser;
        page.server.answer([Say("Half of"), Hang]);
        page.ask("Tell me all.").await;
        browser.reads(".message.assistant .content", "Half of").await;
        page.reload().await;
        page.server.client_gone().await;
        browser.reads(".message.assistant .content", "Half of").await;
        browser.says(".message.assistant footer", "Incomplete: the page was left meanwhile.").await;
    })
    .await;
}
