//! `POST /markdown`: a model's Markdown as HTML for the page.
//!
//! HTML within the text stays text. The page does not rely on that: it copies only elements that it knows
//! (page/render.js).

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::Html;
use math_core::{LatexToMathML, MathCoreConfig, MathDisplay};
use pulldown_cmark::{CodeBlockKind, Event, LinkType, Options, Parser, Tag, TagEnd, html};
use syntect::html::{ClassStyle, ClassedHTMLGenerator};
use syntect::parsing::SyntaxSet;
use syntect::util::LinesWithEndings;

use super::app::App;
use super::error::ApiError;
use super::http::Body;
use super::json;

/// The longest text. The page shows longer ones as they are.
const TEXT_BYTES: usize = 128 << 10;

/// Memory per byte of text, for its HTML: `>` begins a `<blockquote>`.
const HTML_FACTOR: usize = 32;

/// The longest formula. math-core descends once per opening brace, so that this also bounds the stack.
const FORMULA_BYTES: usize = 1 << 10;

/// Bounds of highlighting: bytes and time of an answer, bytes of a line. What is beyond them has no colours.
const CODE_BYTES: usize = 64 << 10;
const CODE_TIME: Duration = Duration::from_millis(200);
const LINE_BYTES: usize = 1 << 10;

/// Memory for the HTML of highlighted code.
const CODE_MEMORY: usize = 4 << 20;

/// `POST /markdown` with `{"text"}`. Needs no model.
pub async fn markdown(State(app): State<Arc<App>>, Body(body, held): Body) -> Result<Html<String>, ApiError> {
    let text = json::text(&body, "text")?.unwrap_or_default();
    if text.len() > TEXT_BYTES {
        return Err(ApiError::field("text", format!("at most {TEXT_BYTES} bytes are formatted")));
    }
    held.grow_to(HTML_FACTOR * text.len() + if text.len() > LINE_BYTES { CODE_MEMORY } else { 0 }).await?;
    Ok(Html(app.work(|| formatted(text)).await))
}

fn options() -> Options {
    Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH | Options::ENABLE_TASKLISTS | Options::ENABLE_MATH
}

fn formatted(text: &str) -> String {
    let text = with_dollars(text);
    let mut budget = Budget { bytes: CODE_BYTES, until: Instant::now() + CODE_TIME };
    // The language and the text of the code block that is open.
    let mut code: Option<(String, String)> = None;
    let mut events = Vec::new();
    for event in Parser::new_ext(&text, options()) {
        let event = match event {
            Event::Start(Tag::CodeBlock(kind)) => {
                code = Some((language(&kind), String::new()));
                Event::Start(Tag::CodeBlock(kind))
            }
            Event::Text(part) if let Some((_, code)) = &mut code => {
                code.push_str(&part);
                continue;
            }
            Event::End(TagEnd::CodeBlock) => {
                let (language, code) = code.take().unwrap_or_default();
                let shown = budget.highlighted(&code, &language);
                events.push(shown.map_or_else(|| Event::Text(code.into()), |html| Event::Html(html.into())));
                Event::End(TagEnd::CodeBlock)
            }
            Event::Start(Tag::HtmlBlock) => Event::Start(Tag::Paragraph),
            Event::End(TagEnd::HtmlBlock) => Event::End(TagEnd::Paragraph),
            Event::Html(text) | Event::InlineHtml(text) => Event::Text(text),
            // Images are not loaded.
            Event::Start(Tag::Image { dest_url, title, id, .. }) => {
                Event::Start(Tag::Link { link_type: LinkType::Inline, dest_url, title, id })
            }
            Event::End(TagEnd::Image) => Event::End(TagEnd::Link),
            Event::InlineMath(formula) => math(&formula, MathDisplay::Inline),
            Event::DisplayMath(formula) => math(&formula, MathDisplay::Block),
            // Models break lines where they want them broken. Formulas on lines of their own need no more room.
            Event::SoftBreak if !matches!(events.last(), Some(Event::InlineHtml(_))) => Event::HardBreak,
            other => other,
        };
        events.push(event);
    }
    let mut made = String::new();
    html::push_html(&mut made, events.into_iter());
    // The page's policy allows no style attributes. Text has no `<`.
    made.replace("<th style=", "<th data-style=").replace("<td style=", "<td data-style=")
}

/// The first word after a fence.
fn language(kind: &CodeBlockKind) -> String {
    let CodeBlockKind::Fenced(words) = kind else { return String::new() };
    words.split([' ', ',', '{']).next().unwrap_or_default().to_owned()
}

/// A formula; one that math-core does not know is shown as it is written.
fn math(formula: &str, display: MathDisplay) -> Event<'static> {
    static MATH: LazyLock<LatexToMathML> =
        LazyLock::new(|| LatexToMathML::new(MathCoreConfig::default()).expect("there are no macros"));
    let made = (formula.len() <= FORMULA_BYTES).then(|| MATH.convert_with_local_state(formula, display));
    match made {
        Some(Ok(made)) => Event::InlineHtml(made.mathml.replace(" style=\"", " data-style=\"").into()),
        _ => Event::Code(formula.to_owned().into()),
    }
}

/// LaTeX's own delimiters, `\(` and `\[`, as the dollars that pulldown-cmark knows.
fn with_dollars(text: &str) -> Cow<'_, str> {
    if !text.contains("\\(") && !text.contains("\\[") {
        return text.into();
    }
    let is_code = |event: &Event| matches!(event, Event::Code(_) | Event::Start(Tag::CodeBlock(_)));
    let events = Parser::new_ext(text, options()).into_offset_iter();
    let code: Vec<Range<usize>> = events.filter(|(event, _)| is_code(event)).map(|(_, range)| range).collect();
    let mut made = String::new();
    let mut rest = 0;
    for (at, _) in text.match_indices('\\') {
        let (close, dollars) = match text.as_bytes().get(at + 1) {
            Some(b'(') => ("\\)", "$"),
            Some(b'[') => ("\\]", "$$"),
            _ => continue,
        };
        let in_code = code.get(code.partition_point(|range| range.end <= at)).is_some_and(|range| range.start <= at);
        if at < rest || in_code || text[..at].ends_with('\\') {
            continue;
        }
        let formula = &text[at + 2..];
        let formula = &formula[..formula.floor_char_boundary(FORMULA_BYTES)];
        let Some((formula, _)) = formula.split_once(close) else { continue };
        if formula.trim().is_empty() || formula.contains('$') || formula.contains("\n\n") {
            continue;
        }
        made.push_str(&text[rest..at]);
        made.extend([dollars, formula.trim(), dollars]);
        rest = at + 2 + formula.len() + close.len();
    }
    made.push_str(&text[rest..]);
    made.into()
}

/// Bytes and time that highlighting may still take.
struct Budget {
    bytes: usize,
    until: Instant,
}

impl Budget {
    /// Code with classes `hl-…`; `None` for languages that are not known and beyond the bounds.
    fn highlighted(&mut self, code: &str, language: &str) -> Option<String> {
        static SYNTAXES: LazyLock<SyntaxSet> = LazyLock::new(two_face::syntax::extra_newlines);
        if language.is_empty() || code.len() > self.bytes {
            return None;
        }
        self.bytes -= code.len();
        let syntax = SYNTAXES.find_syntax_by_token(language)?;
        let style = ClassStyle::SpacedPrefixed { prefix: "hl-" };
        let mut made = ClassedHTMLGenerator::new_with_class_style(syntax, &SYNTAXES, style);
        for line in LinesWithEndings::from(code) {
            if line.len() > LINE_BYTES || Instant::now() > self.until {
                return None;
            }
            made.parse_html_for_line_which_includes_newline(line).ok()?;
        }
        Some(made.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markdown_becomes_html() {
        let made = formatted("# A *b*\n\n| a | b |\n|---|:-:|\n| 1 | ~~2~~ |\n\n- [x] c\nd\n\n> e");
        for part in [
            "<h1>A <em>b</em></h1>",
            "<table>",
            "<del>2</del>",
            "<td data-style=",
            "checked",
            "c<br />\nd",
            "<blockquote>",
        ] {
            assert!(made.contains(part), "{part}: {made}");
        }
    }

    #[test]
    fn html_stays_text_and_images_become_links() {
        let made = formatted("<script>x</script>\n\na <b onclick=\"y\">c</b>\n\n![d](http://e/f.png)");
        assert_eq!(
            made,
            "<p>&lt;script&gt;x&lt;/script&gt;\n</p>\n<p>a &lt;b onclick=\"y\"&gt;c&lt;/b&gt;</p>\n\
             <p><a href=\"http://e/f.png\">d</a></p>\n"
        );
    }

    #[test]
    fn formulas_have_dollars_or_backslashes() {
        assert!(!formatted("$\\begin{aligned}a&=b\\end{aligned}$").contains(" style="));
        for text in ["$x^2$", "a \\(x^2\\)", "\\[\nx^2\n\\]", "$$x^2$$"] {
            let made = formatted(text);
            assert!(made.contains("<msup><mi>x</mi><mn>2</mn></msup>"), "{text}: {made}");
        }
        // Code, an escaped backslash, and a formula that does not end.
        for text in ["`\\(x\\)`", "```\n\\[x\\]\n```", "\\\\(x\\\\)", "\\(x"] {
            assert!(!formatted(text).contains("<math"), "{text}");
        }
        assert!(!formatted("$$x$$\na").contains("<br"));
        assert_eq!(formatted("$\\nonsense$"), "<p><code>\\nonsense</code></p>\n");
    }

    #[test]
    fn code_is_highlighted_within_bounds() {
        let made = formatted("```rust\nfn a() {}\n```");
        assert!(made.starts_with("<pre><code class=\"language-rust\"><span class=\"hl-source hl-rust\">"), "{made}");
        assert_eq!(formatted("```none\n<\n```"), "<pre><code class=\"language-none\">&lt;\n</code></pre>\n");
        let long = format!("```rust\n{}\n```", "<".repeat(LINE_BYTES + 1));
        assert!(!formatted(&long).contains("hl-"));
        for language in ["ts", "toml", "python", "bash", "json", "c++", "Dockerfile"] {
            assert!(formatted(&format!("```{language}\nx = 1\n```")).contains("hl-"), "{language}");
        }
    }

    #[test]
    fn deep_nesting_needs_no_deep_stack() {
        for part in [">", "[", "*a ", "- ", "<b>", "![", "`", "|a", "\\(", "\\["] {
            formatted(&part.repeat(TEXT_BYTES / part.len()));
        }
        for part in ["{", "x^", "\\sqrt", "\\frac", "\\left(", "\\begin{matrix}", "\\text{", "_{"] {
            formatted(&format!("$${}x$$", part.repeat((FORMULA_BYTES - 1) / part.len())));
            let closed = part.repeat(FORMULA_BYTES / (part.len() + 2)) + "x";
            formatted(&format!("$${closed}{}$$", "}".repeat(closed.matches('{').count())));
        }
    }
}
