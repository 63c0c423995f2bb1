//! The system calls that a serving process is denied.
//!
//! What comes from strangers is parsed in this process. Should a parser ever be made to run code, then that code finds
//! these calls failing with EPERM:
//!
//! | denied | so that it cannot |
//! |---|---|
//! | `execve`, `execveat`, memory that is made executable (`mmap`, `mprotect`, `pkey_mprotect`, `shmat`) | run a program, or bring its own |
//! | `socket`, `socketpair`, `connect`, `bind`, `listen`, `accept`, `accept4`, System V and POSIX message queues | talk to the network or to another process |
//! | `ptrace`, `process_vm_readv`, `process_vm_writev`, `process_madvise`, `pidfd_getfd`, `kcmp` | look into another process |
//! | `mount` and all calls of its kind but `umount2`, `pivot_root`, `chroot`, `unshare`, `setns`, `quotactl`, `swapon`, `swapoff` | change what others see of the file system |
//! | `open_by_handle_at`, `fanotify_init` | open files that no path of its own leads to |
//! | `bpf`, `perf_event_open`, `userfaultfd`, `io_uring_*`, `add_key`, `request_key`, `keyctl` | reach the parts of the kernel that most exploits go through; io_uring would go around this filter |
//! | modules, `kexec_*`, `reboot`, `acct`, `syslog`, host names, clocks, I/O ports | change the machine |
//!
//! A list of what is allowed instead would have to have every call that std, the C library and the crates make, which
//! changes with their versions, and a call that is not on it would end the mount. Since the answers for most calls depend on
//! nothing but their numbers, the kernel keeps them (Linux 5.11): what is allowed takes 20 to 45 ns longer.
//!
//! An ordinary user unmounts by a setuid program. The thread that starts it ([`Deputy`](super::deputy::Deputy)) is the one
//! without a filter, and only in an ordinary user's process.
//!
//! The process stays dumpable: who may look into it, the user who mounted or root, may read the store as well, and
//! otherwise could neither debug nor measure a mount of his own.

/// The key of the status under which it says whether calls are denied.
pub const FACT: &str = "filter";

/// Denies what is listed above to this thread and to those that it starts from now on. Says "on", or why not: a mount
/// goes on without, where the kernel or the processor has no filters.
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn begin() -> String {
    match calls::deny() {
        Ok(()) => "on".into(),
        Err(error) => {
            tracing::warn!("no system call is denied to this process: {error}");
            format!("off: {error}")
        }
    }
}

/// There is no such filter here.
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
pub fn begin() -> String {
    "off: only for Linux on x86-64 and ARM64".into()
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod calls {
    use libc::*;
    use seccompiler::SeccompCmpArgLen::Dword;
    use seccompiler::SeccompCmpOp::MaskedEq;
    use seccompiler::{
        BackendError, BpfProgram, Error, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule, apply_filter,
    };

    /// Calls that fail whatever their arguments are.
    #[rustfmt::skip]
    pub const DENIED: &[c_long] = &[
        SYS_execve, SYS_execveat,
        SYS_socket, SYS_socketpair, SYS_connect, SYS_bind, SYS_listen, SYS_accept, SYS_accept4,
        SYS_msgget, SYS_mq_open,
        SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_process_madvise, SYS_pidfd_getfd, SYS_kcmp,
        SYS_mount, SYS_move_mount, SYS_mount_setattr, SYS_open_tree, SYS_fsopen, SYS_fspick, SYS_fsconfig, SYS_fsmount,
        SYS_pivot_root, SYS_chroot, SYS_unshare, SYS_setns, SYS_quotactl, SYS_quotactl_fd, SYS_swapon, SYS_swapoff,
        SYS_open_by_handle_at, SYS_fanotify_init,
        SYS_bpf, SYS_perf_event_open, SYS_userfaultfd, SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register,
        SYS_add_key, SYS_request_key, SYS_keyctl,
        SYS_init_module, SYS_finit_module, SYS_delete_module, SYS_kexec_load, SYS_kexec_file_load, SYS_reboot,
        SYS_acct, SYS_syslog, SYS_sethostname, SYS_setdomainname, SYS_settimeofday, SYS_clock_settime, SYS_adjtimex,
        SYS_clock_adjtime,
        #[cfg(target_arch = "x86_64")] SYS_ioperm,
        #[cfg(target_arch = "x86_64")] SYS_iopl,
        #[cfg(target_arch = "x86_64")] SYS_modify_ldt,
        #[cfg(target_arch = "x86_64")] SYS_uselib,
    ];

    /// Calls that fail if the third argument has these bits.
    const DENIED_BITS: &[(c_long, c_int)] =
        &[(SYS_mmap, PROT_EXEC), (SYS_mprotect, PROT_EXEC), (SYS_pkey_mprotect, PROT_EXEC), (SYS_shmat, SHM_EXEC)];

    pub fn deny() -> Result<(), Error> {
        apply_filter(&program()?)
    }

    fn program() -> Result<BpfProgram, BackendError> {
        let denied = DENIED.iter().map(|&call| Ok((call, Vec::new())));
        let with_bits = DENIED_BITS.iter().map(|&(call, bits)| {
            let bits = u64::from(bits.unsigned_abs());
            let condition = SeccompCondition::new(2, Dword, MaskedEq(bits), bits)?;
            Ok((call, vec![SeccompRule::new(vec![condition])?]))
        });
        let rules = denied.chain(with_bits).collect::<Result<_, BackendError>>()?;
        let refuse = SeccompAction::Errno(EPERM.unsigned_abs());
        let processor = std::env::consts::ARCH.try_into()?;
        let filter: BpfProgram =
            SeccompFilter::new(rules, SeccompAction::Allow, refuse.clone(), processor)?.try_into()?;
        Ok([no_second_numbers(refuse.into()).to_vec(), filter].concat())
    }

    /// On x86-64 each call has a second number, that of the x32 ABI, above these.
    fn no_second_numbers(refused: u32) -> [seccompiler::sock_filter; 3] {
        const X32: u32 = 0x4000_0000;
        let step =
            |code: u32, jump_if_less, k| seccompiler::sock_filter { code: code as u16, jt: 0, jf: jump_if_less, k };
        // The number of the call is the first word of what a filter sees.
        [
            step(BPF_LD | BPF_W | BPF_ABS, 0, 0),
            step(BPF_JMP | BPF_JGE | BPF_K, 1, X32),
            step(BPF_RET | BPF_K, 0, refused),
        ]
    }
}

#[cfg(all(test, target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use std::fs;
    use std::io;
    use std::process::Command;
    use std::thread;

    use super::*;

    /// Makes a call with arguments that would be errors of other kinds.
    fn outcome(call: libc::c_long, arguments: [libc::c_long; 4]) -> Option<i32> {
        let [a, b, c, d] = arguments;
        // SAFETY: no address is valid, and no memory is mapped that is in use.
        let result = unsafe { libc::syscall(call, a, b, c, d) };
        (result == -1).then(|| io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    /// A filter is that of a thread and of those that it starts.
    #[test]
    fn what_is_denied_fails_and_all_else_goes_on() {
        let work = || {
            assert_eq!(begin(), "on");
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            assert!(status.contains("Seccomp:\t2\n") && status.contains("NoNewPrivs:\t1\n"), "{status}");
            let denied = Some(libc::EPERM);
            for &call in calls::DENIED {
                assert_eq!(outcome(call, [-1, -1, 0, 0]), denied, "call {call}");
                assert_eq!(outcome(call | 0x4000_0000, [-1, -1, 0, 0]), denied, "call {call} of x32");
            }
            let (nowhere, code) = (1 << 13, libc::c_long::from(libc::PROT_READ | libc::PROT_EXEC));
            for call in [libc::SYS_mprotect, libc::SYS_mmap, libc::SYS_pkey_mprotect] {
                assert_eq!(outcome(call, [nowhere, 4096, code, -1]), denied, "call {call}");
            }
            assert_eq!(outcome(libc::SYS_mprotect, [nowhere, 4096, 1, 0]), Some(libc::ENOMEM));
            assert_eq!(Command::new("/bin/true").spawn().unwrap_err().raw_os_error(), denied);
            assert_ne!(outcome(libc::SYS_umount2, [0, 0, 0, 0]), denied);
            thread::spawn(|| fs::read("/proc/self/status").map(drop)).join().unwrap().unwrap();
            thread::spawn(|| assert!(Command::new("/bin/true").spawn().is_err())).join().unwrap();
        };
        thread::spawn(work).join().unwrap();
        Command::new("/bin/true").status().unwrap();
    }
}
