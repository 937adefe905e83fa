//! hobbit-server's page in Chromium and Firefox, with the demo model.

mod browser;
mod heard;

use std::os::unix::fs::symlink;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use browser::{Browser, Kind};
use hobbit_synth::Projector;
use serde_json::json;

use crate::fixture::process::demo_model;
use crate::fixture::{media, not_run};
use crate::http::rig::{Server, until};

const ANSWER: &str = ".message.assistant:last-child .content";
const LENGTH: &str = "(document.querySelector('.message.assistant .content')?.textContent.length ?? 0)";

/// Runs a test on the page of a server with these flags.
async fn page(flags: &[&str], test: impl AsyncFn(&Browser, &Server)) {
    on(|| Server::start(&[&["--alias", "demo"], flags].concat()), test).await;
}

/// Runs a test in each browser that is installed, each with a server of its own.
async fn on(start: impl Fn() -> Server, test: impl AsyncFn(&Browser, &Server)) {
    for kind in Kind::ALL {
        let Some(browser) = Browser::start(kind).await else {
            not_run::not_run(
                &format!("the server's page in {kind:?}"),
                format!("{} is not installed ({})", kind.driver(), kind.remedy()),
            );
            continue;
        };
        // Shown if the test fails.
        println!("in {kind:?}");
        let server = start();
        browser.client.goto(&format!("{}/", server.url)).await.unwrap();
        test(&browser, &server).await;
        assert_eq!(browser.console().await, [""; 0], "the policy is kept, and no script fails");
        browser.client.clone().close().await.unwrap();
    }
}

#[tokio::test]
async fn an_answer_streams_is_stopped_and_regenerated() {
    // The answer does not end by itself.
    page(&["--ignore-eos", "--context-shift", "--expert-cache", "50%"], async |browser, server| {
        browser.ask("What is the best book?").await;
        browser.until(&format!("{LENGTH} > 20")).await;
        let so_far = browser.value(LENGTH).await;
        browser.until(&format!("{LENGTH} > {so_far}")).await;
        assert_eq!(browser.value("document.querySelector('.message.assistant').ariaBusy").await, "true");
        assert_eq!(server.n_busy(), 1);
        browser.click("#stop").await;
        browser.answered().await;
        browser.shows(".message.assistant footer", "Stopped.").await;
        server.wait_for_busy(0);
        assert!(browser.value(LENGTH).await.as_u64() > so_far.as_u64(), "the text so far is kept");

        browser.click("#show-settings").await;
        browser.find("[name=max_tokens]").await.send_keys("24").await.unwrap();
        browser.press("Regenerate").await;
        browser.shows(".message.assistant footer", "The answer reached its limit of tokens.").await;
        let figures = browser.text(".message.assistant .figures-line:nth-of-type(2)").await;
        for part in ["24 tokens · ", " tokens/s · prompt ", " % hits · ", "/token"] {
            assert!(figures.contains(part), "{figures}");
        }
        assert_ne!(browser.value(LENGTH).await, 0);
        assert_eq!(browser.value("document.querySelectorAll('.message').length").await, 2);
    })
    .await;
}

#[tokio::test]
async fn conversations_survive_a_reload() {
    page(&["-n", "4"], async |browser, _| {
        for question in ["About hobbits?", "About dragons?"] {
            browser.click("#new").await;
            browser.ask(question).await;
            browser.answered().await;
        }
        browser.reload().await;
        let titles = "[...document.querySelectorAll('#list .open')].map((one) => one.textContent)";
        assert_eq!(browser.value(titles).await, json!(["About dragons?", "About hobbits?"]));
        browser.reads(".message.user .text", "About dragons?").await;
        browser.shows(".message.assistant footer", "4 tokens").await;
        browser.click("#list li:nth-child(2) .open").await;
        browser.reads(".message.user .text", "About hobbits?").await;
        browser.value("document.querySelector('#list li:nth-child(2) .tools button').focus()").await;
        browser.click("#list li:nth-child(2) .tools button:last-child").await;
        browser.reads("#notice-text", "Deleted: About hobbits?.").await;
        assert_eq!(browser.value(titles).await, json!(["About dragons?"]));
        browser.click("#notice-action").await;
        browser.reload().await;
        assert_eq!(browser.value(titles).await, json!(["About dragons?", "About hobbits?"]));
    })
    .await;
}

#[tokio::test]
async fn conversations_are_searched_and_branched() {
    page(&["-n", "4"], async |browser, server| {
        let shown = "[...document.querySelectorAll('#list .open')].map((one) => one.textContent)";
        let texts = "[...document.querySelectorAll('.message.user .text')].map((one) => one.textContent)";
        browser.ask("About hobbits?").await;
        browser.answered().await;
        browser.ask("About dragons?").await;
        browser.until("document.querySelectorAll('.message.assistant footer button').length === 4").await;
        // An earlier message is edited in a conversation of its own.
        browser.press("Edit").await;
        browser.keys(" And rings?\u{e007}").await;
        browser.until(&format!("{texts}.length === 1")).await;
        browser.answered().await;
        assert_eq!(browser.value(texts).await, json!(["About hobbits? And rings?"]));
        assert_eq!(browser.value(shown).await, json!(["About hobbits? And rings?", "About hobbits?"]));
        browser.click("#list li:nth-child(2) .open").await;
        assert_eq!(browser.value(texts).await, json!(["About hobbits?", "About dragons?"]));
        browser.press("Branch").await;
        browser.until(&format!("{texts}.length === 1")).await;
        browser.shows("#spoken", "This is a new conversation").await;
        assert_eq!(browser.value(&format!("{shown}.length")).await, 3);
        browser.find("#search").await.send_keys("DRAGONS").await.unwrap();
        assert_eq!(browser.value(shown).await, json!(["About hobbits?"]));
        server.wait_for_busy(0);
    })
    .await;
}

#[tokio::test]
async fn files_and_settings_go_into_a_request() {
    let dir = tempfile::tempdir().unwrap();
    let [text, binary] = ["notes.txt", "picture.png"].map(|name| dir.path().join(name));
    std::fs::write(&text, "one\n```\ntwo\n").unwrap();
    std::fs::write(&binary, [0xff, 0xfe, 0]).unwrap();
    page(&["-n", "2"], async |browser, _| {
        browser.ready().await;
        let files = browser.find("#attach-files").await;
        files.send_keys(&binary.display().to_string()).await.unwrap();
        browser.shows("#notice-text", "picture.png: this model takes no images").await;
        files.send_keys(&text.display().to_string()).await.unwrap();
        browser.shows("#attached li", "notes.txt").await;
        browser.click("#show-settings").await;
        browser.find("#system").await.send_keys("Be brief.").await.unwrap();
        browser.click("#preset-save").await;
        browser.click("details.wide summary").await;
        browser.find("[name=dry_multiplier]").await.send_keys("0.5").await.unwrap();
        browser
            .run(
                "const send = fetch; window.sent = [];
                 window.fetch = (to, options) => { sent.push(options.body); return send(to, options); };",
            )
            .await;
        browser.ask("Read this.").await;
        browser.answered().await;
        browser.reads(".message.user .text", "Read this.\n\nnotes.txt:\n````\none\n```\ntwo\n````").await;
        let sent = browser.value("JSON.parse(sent.find((body) => body))").await;
        assert_eq!(sent["dry_multiplier"], 0.5);
        assert_eq!(sent["messages"][0], json!({"role": "system", "content": "Be brief."}));
        browser.reload().await;
        browser.click("#new").await;
        assert_eq!(browser.value("[...document.getElementById('preset').options].at(-1).value").await, "Be brief.");
    })
    .await;
}

#[tokio::test]
async fn a_key_is_asked_for_and_forgotten_with_the_tab() {
    page(&["--api-key", "s3cret", "-n", "2"], async |browser, _| {
        browser.reads("#notice-text", "This server wants an API key.").await;
        browser.click("#notice-action").await;
        browser.until("document.activeElement.id === 'key'").await;
        browser.keys("s3cret\u{e007}").await;
        browser.ready().await;
        browser.ask("Let me in.").await;
        browser.answered().await;
        browser.shows(".message.assistant footer", "2 tokens").await;
        let is_kept = "Object.values(localStorage).some((kept) => kept.includes('s3cret'))";
        assert_eq!(browser.value(is_kept).await, false);
        assert_eq!(browser.value("sessionStorage.getItem('hobbit.key')").await, "s3cret");
    })
    .await;
}

/// Text that would run, load or lead somewhere if it became HTML or a link as it is.
const HOSTILE: &str = "<img src=x onerror=\"window.harmed=1\"> <script>window.harmed=1</script>";
const LINKS: &str = "[a](javascript:alert(1)) [b](data:text/html,c) ![d](http://127.0.0.1:9/x.png) <javascript:e>";
const HARMFUL: &str = "[...document.querySelectorAll('#messages, #list')].flatMap((one) => [...one.querySelectorAll(
    'img, script, svg, b, iframe, style, [onclick], [onerror], a:not([href^=http]), a:not([rel~=noopener])')]).length";

/// A grammar whose only text is this.
fn only(text: &str) -> String {
    format!("root ::= {}", json!(text))
}

#[tokio::test]
async fn no_text_becomes_harmful() {
    let nested = format!("{}deep", ">".repeat(80));
    let grammar =
        only(&format!("{HOSTILE}\n\n# **{HOSTILE}**\n\n{LINKS}\n\n$\\href{{javascript:f}}{{g}}$\n\n{nested}\n"));
    page(&["--grammar", &grammar], async |browser, _| {
        browser.ask(HOSTILE).await;
        browser.answered().await;
        for _ in 0..2 {
            browser.shows(&format!("{ANSWER} h1 strong"), HOSTILE).await;
            browser.shows(&format!("{ANSWER} > p"), HOSTILE).await;
            browser.shows(&format!("{ANSWER} blockquote blockquote"), "deep").await;
            assert!(browser.value("document.querySelectorAll('blockquote').length").await.as_u64() < Some(70));
            browser.shows(&format!("{ANSWER} a"), "d (http://127.0.0.1:9/x.png)").await;
            browser.shows(ANSWER, "a (javascript:alert(1)) b (data:text/html,c)").await;
            browser.reads(".message.user .text", HOSTILE).await;
            browser.shows("#list .open", "<img src=x").await;
            assert_eq!(browser.value(HARMFUL).await, 0);
            assert_eq!(browser.value("window.harmed ?? null").await, json!(null));
            browser.reload().await;
        }

        for (violation, word) in [
            ("document.body.innerHTML = '<b>harm</b>'", "trusted"),
            ("document.body.setAttribute('style', 'color: red')", "style-src"),
            ("document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.1:9/x.png' }))", "img-src"),
            ("await fetch('http://127.0.0.1:9/')", "connect-src"),
        ] {
            browser.run(&format!("try {{ {violation} }} catch {{}}")).await;
            browser.logs(word).await;
        }
    })
    .await;
}

#[tokio::test]
async fn an_answer_is_formatted() {
    let text = "## A\n\n| b | c |\n|---|--:|\n| 1 | 2 |\n\n- d\n\n```python\ndef e(): return 'f'\n```\n\n\
                \\(x^2\\) and [g](http://127.0.0.1:9/h)\n";
    page(&["--grammar", &only(text)], async |browser, _| {
        browser.ask("Show me all.").await;
        browser.answered().await;
        browser.reads(&format!("{ANSWER} h2"), "A").await;
        browser.reads(&format!("{ANSWER} td:last-child"), "2").await;
        browser.reads(&format!("{ANSWER} li"), "d").await;
        browser.reads(&format!("{ANSWER} .code .caption span"), "python").await;
        browser.reads(&format!("{ANSWER} pre .hl-storage"), "def").await;
        browser.reads(&format!("{ANSWER} msup"), "x2").await;
        browser.reads(&format!("{ANSWER} a"), "g (http://127.0.0.1:9/h)").await;
        let size = format!("parseFloat(getComputedStyle(document.querySelector('{ANSWER} pre code')).fontSize)");
        assert!(browser.value(&size).await.as_f64() >= Some(14.0));
        let height = format!("document.querySelector('{ANSWER} math').getBoundingClientRect().height > 0");
        assert_eq!(browser.value(&height).await, true);
        browser.click(&format!("{ANSWER} .code button")).await;
        browser.reads(&format!("{ANSWER} .code button"), "Copied").await;
        browser.find("#input").await.send_keys("\u{e009}v\u{e000}").await.unwrap();
        browser.until("document.getElementById('input').value === \"def e(): return 'f'\\n\"").await;
    })
    .await;
}

const TAB: &str = "\u{e004}";
const ENTER: &str = "\u{e007}";
const ESCAPE: &str = "\u{e00c}";

#[tokio::test]
async fn keys_reach_everything() {
    let focused = "document.activeElement.id";
    page(&["--ignore-eos", "-n", "24", "--expert-cache", "50%"], async |browser, _| {
        browser.ready().await;
        assert_eq!(browser.value(focused).await, "input");
        browser.keys("What is the best book?\u{e007}").await;
        browser.answered().await;
        for selector in [".message.user footer button", "#input", "#send", "#see", "#widen", "#map", "#show-list"] {
            browser.reach(selector, TAB).await;
            let outline = "getComputedStyle(document.activeElement).outlineStyle";
            assert_eq!(browser.value(outline).await, "solid", "{selector}");
        }
        browser.reach("#see", TAB).await;
        browser.keys(ENTER).await;
        browser.until("document.querySelectorAll('#list .open').length === 2").await;
        browser.answered().await;
        // As with every new conversation.
        assert_eq!(browser.value(focused).await, "input");

        // A pane over the chat keeps the focus, and gives it back.
        browser.client.set_window_size(600, 800).await.unwrap();
        browser.until("document.getElementById('list-pane').hidden").await;
        for (button, pane, inside) in [("#show-list", "list-pane", "#new"), ("#show-settings", "settings", "#system")] {
            browser.reach(button, TAB).await;
            browser.keys(ENTER).await;
            browser.reach(inside, TAB).await;
            assert_eq!(browser.value("document.getElementById('chat').inert").await, true);
            browser.keys(ESCAPE).await;
            browser.until(&format!("document.getElementById('{pane}').hidden")).await;
            assert_eq!(browser.value("document.activeElement.matches('[aria-controls]')").await, true);
            assert_eq!(browser.value("document.getElementById('chat').inert").await, false);
        }

        browser.reach("#show-list", TAB).await;
        browser.keys(ENTER).await;
        browser.reach("#list li:nth-child(2) [aria-label^=Delete]", TAB).await;
        browser.keys(ENTER).await;
        assert_eq!(browser.value("document.querySelectorAll('#list .open').length").await, 1);
        browser.reach("#notice-action", TAB).await;
        browser.keys(ENTER).await;
        assert_eq!(browser.value("document.querySelectorAll('#list .open').length").await, 2);
    })
    .await;
}

#[tokio::test]
async fn the_demo_shows_how_it_works() {
    on(
        || Server::demo(&["--alias", "demo", "-n", "24"]),
        async |browser, server| {
            assert!(server.log.contains("see it work"), "{}", server.log);
            browser.ready().await;
            assert_eq!(browser.value("document.getElementById('empty-demo').hidden").await, false);
            browser.click("#see").await;
            browser.answered().await;
            browser.shows("#rates", "% since start").await;
            assert_eq!(server.get("/experts").ok()["managed"], true);
            // It has learned no chats.
            let chat = json!({"messages": [{"role": "user", "content": "Once"}]});
            assert_eq!(server.post("/apply-template", &chat).ok()["prompt"], "Once\n");
        },
    )
    .await;
    page(&[], async |browser, _| {
        browser.ready().await;
        assert_eq!(browser.value("document.getElementById('models').hidden").await, true, "there is one model");
        browser.shows("#command", "demo.gguf --expert-cache 50%").await;
        browser.click("#copy-command").await;
        browser.reads("#copy-command", "Copied").await;
    })
    .await;
}

#[tokio::test]
async fn a_model_is_chosen() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a.gguf", "b.gguf"] {
        symlink(demo_model(), dir.path().join(name)).unwrap();
    }
    let home = dir.path().join("home");
    let flags = ["--context-shift", "-n", "4", "--no-models-autoload"];
    let start = || Server::start_router(dir.path(), &home, "http://127.0.0.1:1", &flags);
    let chosen = |name: &str| format!("document.getElementById('models').value === '{name}'");
    on(start, async |browser, server| {
        browser.until(&chosen("a")).await;
        browser.shows("#experts-none", "not in memory").await;
        assert!(server.children().is_empty(), "to look at a model does not load it");
        browser.reach("#models", TAB).await;
        browser.keys("b").await;
        browser.until(&chosen("b")).await;
        browser.reads("#model", "b").await;
        // The other model is in memory for as long as its answer lasts.
        let endless = json!({"model": "a", "prompt": "The river", "n_predict": -1, "ignore_eos": true});
        let mut other = server.stream("/completion?autoload=true", &endless);
        assert!(other.next().unwrap().data["content"].is_string());
        browser.ask("Who is there?").await;
        browser.reads("#status", "loading the model").await;
        drop(other);
        browser.shows(".message.assistant footer", "4 tokens").await;
        browser.reads("#status", "").await;
        browser.shows("#experts-none", "The whole model is in memory").await;
        assert_eq!(server.get("/props").ok()["model_alias"], "b");
        // The choice is kept, whether or not the model is in memory.
        server.post("/models/unload", &json!({"model": "b"})).ok();
        until("b is unloaded", || server.children().is_empty());
        browser.reload().await;
        browser.until(&chosen("b")).await;
        browser.shows("#experts-none", "not in memory").await;
        // Without a choice it is the model that is in memory.
        browser.run("localStorage.removeItem('hobbit.model')").await;
        server.post("/v1/completions?autoload=true", &json!({"model": "b", "prompt": "x", "max_tokens": 1})).ok();
        browser.reload().await;
        browser.until(&chosen("b")).await;
        browser.shows("#experts-none", "The whole model is in memory").await;
    })
    .await;
}

#[tokio::test]
async fn an_image_is_attached() {
    let files = media::files("qwen3vlmoe", Projector::Qwen2vl);
    let (model, projector) = (files.model.to_str().unwrap(), files.projector.path.to_str().unwrap());
    page(&["-m", model, "--mmproj", projector, "-n", "4", "--ignore-eos"], async |browser, _| {
        browser.ready().await;
        let png = "(() => {
            const canvas = Object.assign(document.createElement('canvas'), { width: 130, height: 70 });
            canvas.getContext('2d').fillRect(20, 10, 60, 30);
            return canvas.toDataURL('image/png').split(',')[1];
        })()";
        let png = STANDARD.decode(browser.value(png).await.as_str().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("picture.png");
        std::fs::write(&file, png).unwrap();
        browser.until("document.getElementById('attach').title.includes('images')").await;
        browser.find("#attach-files").await.send_keys(&file.display().to_string()).await.unwrap();
        browser.shows("#attached li", "picture.png").await;
        browser.ask("What is this?").await;
        browser.shows(".message.assistant footer", "4 tokens").await;
        browser.until("document.querySelector('.message.user img').naturalWidth === 130").await;
        // It stays with the conversation.
        browser.reload().await;
        browser.until("document.querySelector('.message.user img')?.naturalWidth === 130").await;
    })
    .await;
}

/// Layers and experts as drawn, a letter for each: H where at least half as many pixels as in the fullest cell.
const DRAWN: &str = "((layers, experts) => {
    const canvas = document.getElementById('map');
    const layersAcross = document.getElementById('map-axes').textContent.startsWith('Layers across');
    const [columns, rows] = layersAcross ? [layers, experts] : [experts, layers];
    const [wide, high] = [canvas.width / columns, canvas.height / rows];
    const cell = (index) => {
        const [layer, expert] = [Math.floor(index / experts), index % experts];
        const [column, row] = layersAcross ? [layer, expert] : [expert, layer];
        const { data } = canvas.getContext('2d').getImageData(column * wide, row * high, wide, high);
        return data.filter((value, index) => index % 4 === 3 && value > 0).length;
    };
    const cells = [...Array(layers * experts).keys()].map(cell);
    return cells.map((pixels) => (2 * pixels >= Math.max(...cells) ? 'H' : '.')).join('');
})";

#[tokio::test]
async fn the_map_shows_resident_experts() {
    page(&["--mem-budget", "192MiB", "--expert-cache", "50%", "-n", "24"], async |browser, server| {
        browser.ask("What is the best book?").await;
        browser.shows(".message.assistant footer", " tokens/s").await;
        server.wait_for_busy(0);
        // The caches are at rest: the page shows the server's answer.
        let experts = server.get("/experts").ok();
        let layers: Vec<&str> =
            experts["layers"].as_array().unwrap().iter().map(|layer| layer["cells"].as_str().unwrap()).collect();
        let cells = layers.concat();
        let here = cells.matches('H').count();
        assert!(here > 0 && here < cells.len(), "{cells}");
        assert_eq!(here + cells.matches('.').count(), cells.len(), "{cells}");
        browser.reads("#map-summary", &format!("{here} of {} experts are in memory.", cells.len())).await;
        let (n_layers, n_experts) = (layers.len(), layers[0].len());
        browser.until(&format!("{DRAWN}({n_layers}, {n_experts}) === {cells:?}")).await;
        assert!(experts["totals"]["tokens"].as_u64() > Some(0));
        browser.shows("#rates", "% since start").await;
        browser.shows("#timeline-words", "Read per token over time: now ").await;
        browser.until("document.querySelectorAll('#timeline rect').length > 0").await;
        browser.shows("#slots", "free").await;
        let layer = experts["layers"][0]["layer"].as_u64().unwrap();
        browser.value("document.getElementById('map').focus()").await;
        browser.keys("\u{e014}").await;
        let words = if cells.starts_with('H') { "in memory, high precision" } else { "not in memory" };
        browser.shows("#map-cell", &format!("Layer {layer}, expert 0: {words}. ")).await;
        assert_eq!(server.get("/experts").ok()["layers"], experts["layers"], "nothing has moved");
    })
    .await;
}
