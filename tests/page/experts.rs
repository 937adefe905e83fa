//! The map and its figures.

use fantoccini::key::Key;
use serde_json::{Value, json};

use super::browser::Window;
use super::page_after;

/// Two layers, four experts, each state once.
fn two_layers(tokens: u64) -> Value {
    json!({
        "managed": true, "n_expert": 4, "n_expert_used": 2,
        "layers": [{"layer": 3, "cells": "HLh."}, {"layer": 4, "cells": "lD.."}],
        "totals": {
            "hits": 3 * tokens, "misses": tokens, "bytes_read": tokens << 20, "tokens": tokens,
            "seconds": tokens as f64 / 8.0, "io_wait_seconds": tokens as f64 / 40.0,
        },
        "capacity_bytes": 3_u64 << 30, "expert_bytes": 7_u64 << 30, "requests": {"processing": 1, "waiting": 2},
        "slots": [
            {"id": 0, "is_processing": true, "n_ctx": 4096, "n_past": 100, "n_decoded": 12},
            {"id": 1, "is_processing": false, "n_ctx": 4096, "n_past": 0, "n_decoded": 0},
        ],
    })
}

/// How many pixels of each cell are drawn above and below its middle: [layer][expert][half].
const DRAWN: &str = "
    const canvas = document.getElementById('map');
    const layersAcross = document.getElementById('map-axes').textContent.startsWith('Layers across');
    const [columns, rows] = layersAcross ? [2, 4] : [4, 2];
    const [wide, high] = [canvas.width / columns, canvas.height / rows / 2];
    const half = (layer, expert, below) => {
        const [column, row] = layersAcross ? [layer, expert] : [expert, layer];
        const top = (2 * row + below) * high;
        const { data } = canvas.getContext('2d').getImageData(column * wide, top, wide, high);
        return data.filter((value, index) => index % 4 === 3 && value > 0).length;
    };
    return [0, 1].map((layer) => [0, 1, 2, 3].map((expert) => [0, 1].map((below) => half(layer, expert, below))));";

#[tokio::test]
async fn the_map_draws_every_state_and_says_it_in_words() {
    page_after(
        Window::Desk,
        |server| server.set_experts(two_layers(100)),
        async |page| {
            page.ready().await;
            let browser = &page.browser;
            let words = "2 of 8 experts are in memory, 1 of them in low precision; 1 on a device; 2 being read.";
            browser.reads("#map-summary", words).await;
            browser.says("#map-axes", "a token uses 2 per layer.").await;
            browser.says("#rates", "75 % since start").await;
            browser.says("#rates", "3 GiB").await;
            browser.says("#rates", "for experts of 7 GiB").await;
            browser.says("#slots", "busy, 12 tokens so far").await;
            assert_eq!(
                browser.value("[...document.querySelectorAll('#legend li')].map((one) => one.textContent)").await,
                json!([
                    "in memory, high precision1",
                    "in memory, low precision1",
                    "being read, high precision1",
                    "being read, low precision1",
                    "on a device1",
                    "not in memory3",
                ])
            );
            // Shapes alone tell the states apart.
            let drawn = browser.run(DRAWN, Value::Null).await;
            let cells: Vec<_> = drawn.as_array().unwrap().iter().flat_map(|layer| layer.as_array().unwrap()).collect();
            let states: std::collections::HashSet<_> = [0, 1, 2, 4, 5, 3].map(|cell| cells[cell].to_string()).into();
            assert_eq!(states.len(), 6, "{drawn}");
            assert_eq!((cells[3], cells[3]), (cells[6], cells[7]));
            let colors = browser
                .value(
                    "new Set([...document.querySelectorAll('.swatch')].map((one) => getComputedStyle(one).color)).size",
                )
                .await;
            assert_eq!(colors, 5);

            // What comes later is shown, and rates are differences.
            page.server.set_experts(two_layers(140));
            browser.says("#rates", "1 MiB").await;
            browser.says("#rates", "125 ms").await;
            browser.says("#rates", "25 ms for the disk").await;
            browser.says("#rates", "75 %").await;
        },
    )
    .await;
}

#[tokio::test]
async fn a_cell_is_told_by_mouse_and_by_keys() {
    page_after(
        Window::Desk,
        |server| server.set_experts(two_layers(100)),
        async |page| {
            page.ready().await;
            let browser = &page.browser;
            browser.until("!document.getElementById('experts-live').hidden").await;
            browser.value("document.getElementById('map').focus()").await;
            browser.keys(&char::from(Key::Right).to_string()).await;
            browser.reads("#map-cell", "Layer 3, expert 0: in memory, high precision").await;
            let down_is_layer = browser.text("#map-axes").await.starts_with("Experts across");
            let (next_layer, next_expert) =
                if down_is_layer { (Key::Down, Key::Right) } else { (Key::Right, Key::Down) };
            browser.keys(&char::from(next_expert).to_string()).await;
            browser.reads("#map-cell", "Layer 3, expert 1: in memory, low precision").await;
            browser.keys(&char::from(next_layer).to_string()).await;
            browser.reads("#map-cell", "Layer 4, expert 1: on a device").await;
            browser.reads("#map-tip", "Layer 4, expert 1: on a device").await;
            browser.value("document.getElementById('map').blur()").await;
            browser.until("document.getElementById('map-tip').hidden").await;
            // Cells of 16 pixels, four by two.
            assert!(down_is_layer);
            browser.point("#map", 8.0, 8.0).await;
            browser.reads("#map-tip", "Layer 4, expert 2: not in memory").await;
            browser.point("#map", -24.0, 8.0).await;
            browser.reads("#map-tip", "Layer 4, expert 0: being read, low precision").await;
            browser.point("#composer", 0.0, 0.0).await;
            browser.until("document.getElementById('map-tip').hidden").await;
        },
    )
    .await;
}
