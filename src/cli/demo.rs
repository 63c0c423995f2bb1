//! `wmount demo`.
use crate::error::Result;
/// Try it
#[derive(Debug, clap::Args)]
pub struct DemoArgs {}
pub(super) fn run(_args: &DemoArgs) -> Result<()> {
    Ok(())
}
