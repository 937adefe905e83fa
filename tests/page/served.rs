//! The page with hobbit-server itself and the demo model.

use serde_json::Value;

use super::served;

const LENGTH: &str = "(document.querySelector('.message.assistant .content')?.textContent.length ?? 0)";

#[tokio::test]
async fn words_of_the_model_stream_in_are_stopped_and_come_anew() {
    // An answer that does not end by itself.
    served(&["--ignore-eos", "--context-shift", "--expert-cache", "50%"], async |page| {
        page.ready().await;
        let browser = &page.browser;
        page.ask("What is the best book?").await;
        browser.until(&format!("{LENGTH} > 20")).await;
        let so_far = browser.value(LENGTH).await;
        browser.until(&format!("{LENGTH} > {so_far}")).await;
        assert_eq!(browser.value("document.querySelector('.message.assistant').ariaBusy").await, "true");
        assert_eq!(page.server.n_busy(), 1);
        browser.click("#stop").await;
        page.answered().await;
        browser.says(".message.assistant footer", "Stopped.").await;
        page.server.wait_for_busy(0);
        assert!(browser.value(LENGTH).await.as_u64() > so_far.as_u64(), "what came is kept");

        // The next one ends at its limit, and has its figures.
        browser.click("#show-settings").await;
        browser.find("[name=max_tokens]").await.send_keys("24").await.unwrap();
        page.act("Regenerate").await;
        browser.says(".message.assistant footer", "The answer reached its limit of tokens.").await;
        let figures = browser.text(".message.assistant .figures-line:nth-of-type(2)").await;
        for part in ["24 tokens · ", " tokens/s · prompt ", " % hits · ", "/token"] {
            assert!(figures.contains(part), "{figures}");
        }
        assert_ne!(browser.value(LENGTH).await, 0);
        assert_eq!(browser.value("document.querySelectorAll('.message').length").await, 2);
    })
    .await;
}

/// What is drawn of layers and experts, a letter for each: H where at least half as many pixels as in the fullest cell.
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
async fn the_map_shows_what_is_in_memory() {
    served(&["--mem-budget", "192MiB", "--expert-cache", "50%", "-n", "24"], async |page| {
        page.ready().await;
        let browser = &page.browser;
        page.ask("What is the best book?").await;
        browser.says(".message.assistant footer", " tokens/s").await;
        page.server.wait_for_busy(0);
        // Nothing moves any more: the page says what the server says.
        let experts = page.server.get("/experts").ok();
        let layers: Vec<&str> =
            experts["layers"].as_array().unwrap().iter().map(|layer| layer["cells"].as_str().unwrap()).collect();
        let cells = layers.concat();
        let here = cells.matches('H').count();
        assert!(here > 0 && here < cells.len(), "{cells}");
        assert_eq!(here + cells.matches('.').count(), cells.len(), "{cells}");
        browser.reads("#map-summary", &format!("{here} of {} experts are in memory.", cells.len())).await;
        let (n_layers, n_experts) = (layers.len(), layers[0].len());
        browser.until(&format!("{DRAWN}({n_layers}, {n_experts}) === {cells:?}")).await;
        assert_eq!(experts["totals"]["tokens"].as_u64().map(|n| n > 0), Some(true));
        browser.says("#rates", "% since start").await;
        browser.says("#rates", "in all").await;
        browser.says("#slots", "free").await;
        let layer = experts["layers"][0]["layer"].as_u64().unwrap();
        browser.value("document.getElementById('map').focus()").await;
        browser.keys("\u{e014}").await;
        let words = if cells.starts_with('H') { "in memory, high precision" } else { "not in memory" };
        browser.reads("#map-cell", &format!("Layer {layer}, expert 0: {words}")).await;
        assert_eq!(page.server.get("/experts").ok()["layers"], experts["layers"], "nothing has moved");
        assert_ne!(experts["slots"], Value::Null);
    })
    .await;
}
