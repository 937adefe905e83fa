//! Conversations as the model was trained to read them: chat templates.

use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use ggml_sys::llama::{self, llama_model};
use ggml_sys::shim;

use super::error::Error;
use super::raw::text_of;

/// Room for a message from the shim, in bytes. Jinja errors quote the template around them.
const MESSAGE_BYTES: usize = 4096;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// Who speaks: `system`, `user` or `assistant` in most templates.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl ChatMessage {
    /// A turn of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// How a conversation is written down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatOptions {
    /// A built-in template's name (`chatml`, `llama3`) or a Jinja text; `None` takes the model's own, or `chatml`.
    pub template: Option<String>,
    /// Run the template's text. Without it llama.cpp recognizes well-known templates and writes their format itself,
    /// as it always does for built-in names.
    pub jinja: bool,
    /// End with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self { template: None, jinja: true, add_generation_prompt: true }
    }
}

/// Writes `messages` down with the template of `model` or of `options`. `model` is live, or null where `options` names
/// a template.
pub(super) fn render(
    model: *const llama_model,
    messages: &[ChatMessage],
    options: &ChatOptions,
) -> Result<String, Error> {
    // To the shim an empty template means none.
    let template = options.template.as_deref().unwrap_or("");
    if template.is_empty() && model.is_null() {
        return Err(Error::ChatTemplate("there is neither a model nor a template".into()));
    }
    // As Jinja such a name would be a text that renders as itself.
    let jinja = options.jinja && !(template != "chatml" && is_built_in(template));
    let template = c_text(template, "the template")?;
    let roles: Vec<CString> = messages.iter().map(|turn| c_text(&turn.role, "a role")).collect::<Result<_, _>>()?;
    let contents: Vec<CString> =
        messages.iter().map(|turn| c_text(&turn.content, "a message")).collect::<Result<_, _>>()?;
    let role_pointers: Vec<*const c_char> = roles.iter().map(|text| text.as_ptr()).collect();
    let content_pointers: Vec<*const c_char> = contents.iter().map(|text| text.as_ptr()).collect();
    let mut rendered: Vec<u8> = Vec::new();
    let mut message = [0u8; MESSAGE_BYTES];
    // SAFETY: the strings and both arrays of `n_messages` pointers outlive the call, `rendered` is what `on_text`
    // expects, the message buffer is valid for its length, the model is live or not looked at.
    let done = unsafe {
        shim::hobbit_chat_render(
            model,
            template.as_ptr(),
            jinja,
            options.add_generation_prompt,
            role_pointers.as_ptr(),
            content_pointers.as_ptr(),
            messages.len(),
            on_text,
            (&raw mut rendered).cast(),
            message.as_mut_ptr().cast(),
            message.len(),
        )
    };
    if !done {
        let reason = text_of(&message);
        return Err(Error::ChatTemplate(if reason.is_empty() { "llama.cpp gave no reason".into() } else { reason }));
    }
    String::from_utf8(rendered).map_err(|_| Error::ChatTemplate("what it writes is not UTF-8".into()))
}

unsafe extern "C" fn on_text(rendered: *mut c_void, text: *const c_char, len: usize) {
    // SAFETY: `render` passes its vector; the shim passes `len` readable bytes.
    let (rendered, text) =
        unsafe { (&mut *rendered.cast::<Vec<u8>>(), std::slice::from_raw_parts(text.cast::<u8>(), len)) };
    // No panic may cross into C++.
    let _ = catch_unwind(AssertUnwindSafe(|| rendered.extend_from_slice(text)));
}

/// Whether llama.cpp knows a template by this name.
fn is_built_in(name: &str) -> bool {
    // SAFETY: with room for none the function only counts; then it writes at most `len` pointers to static strings.
    unsafe {
        let count = usize::try_from(llama::llama_chat_builtin_templates(ptr::null_mut(), 0)).unwrap_or(0);
        let mut names: Vec<*const c_char> = vec![ptr::null(); count];
        llama::llama_chat_builtin_templates(names.as_mut_ptr(), names.len());
        names.iter().any(|known| !known.is_null() && CStr::from_ptr(*known).to_bytes() == name.as_bytes())
    }
}

fn c_text(text: &str, what: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::ChatTemplate(format!("{what} contains a NUL byte")))
}

#[cfg(test)]
mod tests {
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
        assert!(is_built_in("llama2"));
        assert!(!is_built_in(""));
        assert!(!is_built_in("hobbit"));
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

        let options = ChatOptions { template: Some("chatml".into()), ..ChatOptions::default() };
        for message in [ChatMessage::new("us\0er", "Hi"), ChatMessage::new("user", "H\0i")] {
            assert!(matches!(render(ptr::null(), &[message], &options), Err(Error::ChatTemplate(_))));
        }
    }
}
