//! The limits of open files, which sockets and shared memory count for, too.

use std::error::Error;
use std::io;

use rustix::io::Errno;

/// Why there is no file for something, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{errno}; {}", advice(*.errno))]
struct NoFile {
    errno: Errno,
}

fn advice(errno: Errno) -> &'static str {
    match errno {
        Errno::NFILE => "raise the limit of open files of this host (`sysctl fs.file-max`)",
        _ => "raise the limit of open files (`ulimit -n`)",
    }
}

/// The same error, with what to do about it if it says that there are too many open files.
pub(crate) fn advised(error: io::Error) -> io::Error {
    match Errno::from_io_error(&error) {
        Some(errno @ (Errno::MFILE | Errno::NFILE)) => io::Error::other(NoFile { errno }),
        _ => error,
    }
}

/// Whether `error` is, or comes from, one that says that there are too many open files: trying again is of no use,
/// and neither is another way to connect.
pub(crate) fn are_exhausted(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            let wrapped = error.get_ref().is_some_and(|inner| inner.is::<NoFile>());
            if wrapped || matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE)) {
                return true;
            }
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::JoinError;

    #[test]
    fn what_to_do_about_too_many_open_files_is_told() {
        for (errno, advice) in [(Errno::MFILE, "`ulimit -n`"), (Errno::NFILE, "`sysctl fs.file-max`")] {
            let error = advised(errno.into());
            assert!(error.to_string().contains(advice), "{error}");
            assert!(are_exhausted(&error) && are_exhausted(&io::Error::from(errno)));
            let behind = JoinError::System { source: error };
            assert!(are_exhausted(&behind) && behind.to_string().contains(advice), "{behind}");
        }
    }

    #[test]
    fn other_errors_are_left_as_they_are() {
        let error = advised(Errno::NOMEM.into());
        assert_eq!(Errno::from_io_error(&error), Some(Errno::NOMEM));
        assert!(!are_exhausted(&error));
    }
}
