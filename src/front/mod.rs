//! What serves the tree: the kernel's FUSE protocol, mounting, and the life of the serving process.
//!
//! A front knows no format and no store. It asks [`crate::vfs::Vfs`] and passes the answers on.

pub mod errno;
pub mod sys;
pub mod mounts;
pub mod unmount;
#[cfg_attr(not(target_os = "linux"), path = "mountpoint_by_path.rs")]
pub mod mountpoint;
pub mod checks;
pub mod machine;
pub mod privileges;
pub mod filter;
pub mod fence;
pub mod deputy;
pub mod push;
#[cfg_attr(not(target_os = "linux"), path = "blobs_elsewhere.rs")]
pub mod blobs;
pub mod passthrough;
pub mod readpath;
#[cfg_attr(not(target_os = "linux"), path = "splice_nowhere.rs")]
pub mod splice;
pub mod tolerate;
pub mod lanes;
mod listing;
mod served;
pub mod fuse;
pub mod answers;
pub mod writes;
pub mod watch;
pub mod lookout;
pub mod session;
pub mod daemon;
