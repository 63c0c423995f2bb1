//! What root's process gives up once it has mounted.
//!
//! It keeps CAP_SYS_ADMIN, to unmount at its end and to hand whole blobs to the kernel, and CAP_DAC_READ_SEARCH, to read a
//! store of another user. It cannot write what the user root may not, nor become anybody else, nor get rights back by
//! running a program.
//!
//! An ordinary user's process has no such rights to give up. What both are denied besides is in [`filter`](super::filter) and
//! [`fence`](super::fence).

use std::io;

/// Gives up what serving does not need, for this thread and those that it starts from now on.
#[cfg(target_os = "linux")]
pub fn give_up() -> io::Result<()> {
    use rustix::thread::{
        CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, remove_capability_from_bounding_set,
        set_capabilities, set_no_new_privs,
    };

    if !super::sys::is_root() {
        return Ok(());
    }
    let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::DAC_READ_SEARCH;
    let kept = needed & capabilities(None)?.permitted;
    // Kernels without ambient capabilities have none to clear; a set that is bound already stays so.
    let _ = clear_ambient_capability_set();
    for capability in CapabilitySet::all().difference(needed).iter() {
        let _ = remove_capability_from_bounding_set(capability);
    }
    set_no_new_privs(true)?;
    Ok(set_capabilities(
        None,
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() },
    )?)
}

/// Gives up what serving does not need.
#[cfg(not(target_os = "linux"))]
pub fn give_up() -> io::Result<()> {
    Ok(())
}
