//! The install script's own check.

use crate::error::Result;
use crate::pg::call::{Call, Returned};

// Raises 55000 where the library was not preloaded, as every function does before
// its body runs; the install script calls it before it makes anything else.
crate::pg::call::sql_function!(awa_require_preload, require_preload);

fn require_preload(_call: &mut Call) -> Result<Returned> {
    Ok(Returned::Void)
}
