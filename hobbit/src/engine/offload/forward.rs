//! Functions of an interface that ggml's own functions answer for what stands behind a wrapper.

/// `name(arguments) -> result = function;` for each function of the interface whose first argument is `$outer`: ggml's
/// `function`, asked about what `$inner` makes of it.
macro_rules! forward {
    ($outer:ty => $inner:expr; $($name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? = $function:ident;)*) => {$(
        unsafe extern "C" fn $name(outer: $outer, $($arg: $type),*) $(-> $result)? {
            // SAFETY: ggml passes a live wrapper, and arguments that the function takes.
            unsafe { llama::$function($inner(outer), $($arg),*) }
        }
    )*};
}

pub(super) use forward;
