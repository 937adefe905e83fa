//! The page's pure parts, one by one.

use serde_json::{Value, json};

use crate::browser::Window;
use crate::page;

/// Calls `function` of a file of the page with each case's arguments.
async fn table(file: &str, function: &str, cases: &[(Value, Value)]) {
    page(Window::Desk, async |page| {
        for (given, expected) in cases {
            let body = format!("const part = await import('/page/{file}'); return part.{function}(...given);");
            assert_eq!(&page.browser.run(&body, given.clone()).await, expected, "{function}({given})");
        }
    })
    .await;
}

#[tokio::test]
async fn text_is_divided_into_blocks() {
    let block = |kind: &str, text: &str, language: &str| json!({"kind": kind, "text": text, "language": language});
    let text = |words: &str| block("text", words, "");
    table(
        "render.js",
        "blocks",
        &[
            (json!([""]), json!([])),
            (json!(["one\ntwo\n\n\nthree"]), json!([text("one\ntwo"), text("three")])),
            (json!(["# Name\nwords\n#no heading"]), json!([block("heading", "Name", ""), text("words\n#no heading")])),
            (
                json!(["a\n```rust\nfn x() {}\n\n# no\n```\nb"]),
                json!([text("a"), block("code", "fn x() {}\n\n# no", "rust"), text("b")]),
            ),
            // Not yet closed: what is there is code.
            (json!(["```\nhalf"]), json!([block("code", "half", "")])),
            (json!(["```"]), json!([block("code", "", "")])),
            // A longer fence holds a shorter one; tildes are no backticks.
            (json!(["````md\n```\nx\n```\n````\ny"]), json!([block("code", "```\nx\n```", "md"), text("y")])),
            (json!(["~~~\n```\n~~~"]), json!([block("code", "```", "")])),
            (json!(["```not a fence``` here"]), json!([text("```not a fence``` here")])),
        ],
    )
    .await;
}

#[tokio::test]
async fn cells_are_as_large_as_fits() {
    let shape = |across: &str, columns: u32, rows: u32, wide: f64, high: f64| {
        let (columns, rows) = (json!(columns), json!(rows));
        json!({"across": across, "columns": columns, "rows": rows, "wide": wide, "high": high})
    };
    // Numbers of scripts have no type: what is whole comes back as an integer.
    let same = |value: &Value, expected: &Value| {
        value["across"] == expected["across"]
            && ["columns", "rows", "wide", "high"].iter().all(|name| value[name].as_f64() == expected[name].as_f64())
    };
    page(Window::Desk, async |page| {
        for (given, expected) in [
            // layers, experts, width, height
            (json!([48, 128, 360, 400]), shape("layers", 48, 128, 6.25, 3.125)),
            (json!([4, 8, 320, 400]), shape("experts", 8, 4, 16.0, 16.0)),
            (json!([32, 8, 320, 400]), shape("experts", 8, 32, 16.0, 12.5)),
            // More than there is room for: as wide as it is, and scrolled.
            (json!([60, 384, 360, 400]), shape("layers", 60, 384, 6.0, 3.0)),
            (json!([600, 2000, 300, 400]), shape("layers", 600, 2000, 0.5, 3.0)),
        ] {
            let body = "const { layout } = await import('/page/map.js'); return layout(...given);";
            let value = page.browser.run(body, given.clone()).await;
            assert!(same(&value, &expected), "{given}: {value}, not {expected}");
        }
    })
    .await;
}

/// The events of a stream that arrives in pieces of so many bytes.
const EVENTS: &str = "
    const { events } = await import('/page/api.js');
    const bytes = new TextEncoder().encode(given[0]);
    const found = [];
    for (const size of [1, 2, 3, 7, bytes.length]) {
        const pieces = [];
        for (let from = 0; from < bytes.length; from += size) pieces.push(bytes.slice(from, from + size));
        const stream = new ReadableStream({
            start(controller) {
                pieces.forEach((piece) => controller.enqueue(piece));
                controller.close();
            },
        });
        const all = [];
        for await (const data of events(stream)) all.push(data);
        found.push(all);
    }
    return found;";

#[tokio::test]
async fn events_are_read_however_they_are_cut() {
    page(Window::Desk, async |page| {
        let stream = ": ping\n\ndata: {\"a\":\"\u{e4}\u{1f600}\"}\n\nevent: x\r\ndata: one\r\ndata:two\r\n\r\n\
                      data: \rdata: three\r\rdata: cut off";
        let found = page.browser.run(EVENTS, json!([stream])).await;
        let expected = json!(["{\"a\":\"\u{e4}\u{1f600}\"}", "one\ntwo", "\nthree"]);
        assert_eq!(found, json!(vec![expected; 5]));
    })
    .await;
}

const FIGURES: &str = "
    const { bytes, short, count, counted, percent, duration } = await import('/page/format.js');
    return [
        ...[0, 1023, 1024, 3.2 * 2 ** 20, 250 * 2 ** 30, 2 ** 50].map(bytes),
        ...[0.123, 8, 12.34, 1234.5].map(short),
        count(6144), counted(1, 'token'), counted(2, 'token'),
        ...[0, 0.0001, 0.42, 0.996, 0.99999, 1].map(percent),
        ...[12, 1234, 125000].map(duration),
    ];";

#[tokio::test]
async fn figures_are_read_at_a_glance() {
    page(Window::Desk, async |page| {
        let expected = json!([
            "0 B",
            "1023 B",
            "1 KiB",
            "3.2 MiB",
            "250 GiB",
            "1,024 TiB",
            "0.12",
            "8",
            "12.3",
            "1,235",
            "6,144",
            "1 token",
            "2 tokens",
            "0 %",
            "0.1 %",
            "42 %",
            "99.6 %",
            "99.9 %",
            "100 %",
            "12 ms",
            "1.2 s",
            "2 min 5 s",
        ]);
        assert_eq!(page.browser.run(FIGURES, json!([])).await, expected);
    })
    .await;
}

/// What rates say after polls: [tokens so far, milliseconds].
const RATES: &str = "
    const { Rates } = await import('/page/rates.js');
    const rates = new Rates();
    return given.map(([tokens, now]) => {
        const [hits, misses, bytes_read] = [9 * tokens, tokens, 1000 * tokens];
        rates.add({ tokens, hits, misses, bytes_read, seconds: tokens / 10, io_wait_seconds: tokens / 50 }, now);
        return [rates.moving, rates.latest?.ms_per_token ?? null, rates.latest?.tokens_per_second ?? null];
    });";

#[tokio::test]
async fn rates_begin_anew_with_another_process() {
    page(Window::Desk, async |page| {
        let polls = json!([[100, 0], [105, 500], [110, 1000], [110, 4000], [110, 4500], [2, 5000], [4, 5500]]);
        let seen = page.browser.run(RATES, polls).await;
        let expected = json!([
            [false, null, null],
            [true, 100, 10],
            [true, 100, 10],
            [false, 100, 10],
            [false, 100, 10],
            // Another process: its totals are smaller.
            [false, null, null],
            [true, 100, 4],
        ]);
        assert_eq!(seen, expected);
    })
    .await;
}
