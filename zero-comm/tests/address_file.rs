//! The file that carries rank 0's address to the others on its host.

use std::error::Error as _;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use zero_comm::{AddressFile, AddressFileError};

/// Long enough for anything that is to succeed.
const LONG: Duration = Duration::from_secs(60);

/// Short enough to wait for in vain.
const SHORT: Duration = Duration::from_millis(100);

fn scene() -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("mine/job.address");
    (root, path)
}

/// Finds what is in the file, and trusts it.
fn read(path: &Path, patience: Duration) -> Result<String, AddressFileError> {
    AddressFile::find(path, patience, |address, _| Ok::<_, io::Error>(address.to_owned()))
}

fn refused() -> io::Error {
    io::ErrorKind::ConnectionRefused.into()
}

fn names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn what_rank_0_publishes_the_others_find() {
    let (_root, path) = scene();
    let file = AddressFile::publish(&path, "127.0.0.1:4242").unwrap();
    assert_eq!(read(&path, LONG).unwrap(), "127.0.0.1:4242");
    let folder = path.parent().unwrap();
    assert_eq!(names(folder), ["job.address"]);
    assert_eq!(fs::metadata(folder).unwrap().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    drop(file);
    assert_eq!(names(folder), [""; 0]);
}

#[test]
fn who_comes_before_rank_0_waits() {
    let (_root, path) = scene();
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(&path, LONG));
        let file = AddressFile::publish(&path, "a:1").unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), "a:1");
        drop(file);
    });
}

#[test]
fn a_file_that_never_comes_is_an_error_at_the_deadline() {
    let (root, path) = scene();
    for make_folder in [false, true] {
        if make_folder {
            drop(AddressFile::publish(&path, "a:1").unwrap());
        }
        let error = read(&path, SHORT).unwrap_err();
        assert!(matches!(error, AddressFileError::Missing { .. }), "{error}");
        assert!(error.to_string().contains("job.address\" did not appear within 100ms"), "{error}");
    }
    // Who only reads makes nothing.
    drop(root);
}

#[test]
fn a_file_of_an_earlier_job_is_read_again_and_replaced() {
    let (_root, path) = scene();
    // A job that was killed removes nothing.
    std::mem::forget(AddressFile::publish(&path, "old").unwrap());
    let mut tried = Vec::new();
    let mut file = None;
    let found = AddressFile::find(&path, LONG, |address, left| {
        assert!(left <= LONG);
        tried.push(address.to_owned());
        if address == "new" {
            return Ok(address.to_owned());
        }
        file = Some(AddressFile::publish(&path, "new").unwrap());
        Err(refused())
    });
    assert_eq!(found.unwrap(), "new");
    assert_eq!(tried, ["old", "new"]);
    drop(file);
    assert!(!path.exists());
}

#[test]
fn an_address_where_nobody_answers_is_named() {
    let (_root, path) = scene();
    let _file = AddressFile::publish(&path, "10.0.0.1:80 and-a-secret").unwrap();
    let error = AddressFile::find(&path, SHORT, |_, _| Err::<(), _>(refused())).unwrap_err();
    assert!(
        matches!(&error, AddressFileError::NobodyAnswers { found, .. } if found == "10.0.0.1:80"),
        "{error}"
    );
    assert_eq!(error.source().unwrap().to_string(), refused().to_string());
    let text = error.to_string();
    assert!(text.contains(&refused().to_string()) && !text.contains("secret"), "{text}");
}

#[test]
fn a_job_removes_only_its_own_file() {
    let (_root, path) = scene();
    let earlier = AddressFile::publish(&path, "earlier").unwrap();
    let later = AddressFile::publish(&path, "later").unwrap();
    drop(earlier);
    assert_eq!(read(&path, LONG).unwrap(), "later");
    // It may be gone already.
    fs::remove_file(&path).unwrap();
    drop(later);
    assert_eq!(names(path.parent().unwrap()), [""; 0]);
}

#[test]
fn a_folder_that_others_may_write_is_not_trusted() {
    for mode in [0o720, 0o702, 0o777] {
        let (_root, path) = scene();
        let folder = path.parent().unwrap();
        fs::create_dir(folder).unwrap();
        fs::write(&path, "evil:1").unwrap();
        fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
        for error in [AddressFile::publish(&path, "a:1").unwrap_err(), read(&path, LONG).unwrap_err()] {
            assert!(matches!(&error, AddressFileError::Unsafe { path, .. } if path == folder), "{error}");
        }
    }
}

#[test]
fn a_file_that_others_may_write_is_not_trusted() {
    let (_root, path) = scene();
    let _file = AddressFile::publish(&path, "a:1").unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o620)).unwrap();
    let error = read(&path, LONG).unwrap_err();
    assert!(matches!(&error, AddressFileError::Unsafe { path: named, .. } if *named == path), "{error}");
}

#[test]
fn what_somebody_else_owns_is_not_trusted() {
    // Only root can give a file away, and for anybody else the folder of the root user is somebody else's.
    let (_root, path) = scene();
    let folder = path.parent().unwrap();
    fs::create_dir(folder).unwrap();
    fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
    let (path, owned) = match std::os::unix::fs::chown(folder, Some(12345), None) {
        Ok(()) => (path.clone(), folder.to_owned()),
        Err(_) => (PathBuf::from("/etc/job.address"), PathBuf::from("/etc")),
    };
    for error in [AddressFile::publish(&path, "a:1").unwrap_err(), read(&path, LONG).unwrap_err()] {
        let AddressFileError::Unsafe { path, reason } = &error else { panic!("{error}") };
        assert_eq!((path, *reason), (&owned, "somebody else owns it"));
    }
}

#[test]
fn links_are_not_followed() {
    let (root, path) = scene();
    let elsewhere = root.path().join("elsewhere");
    let _file = AddressFile::publish(&elsewhere.join("job.address"), "evil:1").unwrap();
    symlink(&elsewhere, path.parent().unwrap()).unwrap();
    for error in [AddressFile::publish(&path, "a:1").unwrap_err(), read(&path, LONG).unwrap_err()] {
        assert!(matches!(error, AddressFileError::Unsafe { .. }), "{error}");
    }

    let path = root.path().join("other/job.address");
    drop(AddressFile::publish(&path, "a:1").unwrap());
    symlink(elsewhere.join("job.address"), &path).unwrap();
    let error = read(&path, LONG).unwrap_err();
    assert!(matches!(error, AddressFileError::Unsafe { reason: "it is a link", .. }), "{error}");
    // Publishing replaces the link, not what it leads to.
    let _file = AddressFile::publish(&path, "a:1").unwrap();
    assert_eq!(read(&path, LONG).unwrap(), "a:1");
    assert_eq!(fs::read_to_string(elsewhere.join("job.address")).unwrap(), "evil:1");
}

#[test]
fn what_is_no_file_is_refused() {
    let (_root, path) = scene();
    drop(AddressFile::publish(&path, "a:1").unwrap());
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
    let error = read(&path, LONG).unwrap_err();
    assert!(matches!(error, AddressFileError::Unsafe { reason: "it is not a file", .. }), "{error}");
    let error = AddressFile::publish(&path, "a:1").unwrap_err();
    assert!(matches!(error, AddressFileError::Io { action: "written", .. }), "{error}");
}

#[test]
fn what_is_no_address_is_refused() {
    let (_root, path) = scene();
    let long = "a".repeat(4097);
    for address in ["", &long] {
        let error = AddressFile::publish(&path, address).unwrap_err();
        assert!(matches!(error, AddressFileError::Malformed { .. }), "{error}");
    }
    assert!(!path.exists());
    let _file = AddressFile::publish(&path, &long[1..]).unwrap();
    assert_eq!(read(&path, LONG).unwrap(), long[1..]);
    for content in [&b""[..], long.as_bytes(), &[0xff]] {
        fs::write(&path, content).unwrap();
        let error = read(&path, LONG).unwrap_err();
        assert!(matches!(error, AddressFileError::Malformed { .. }), "{error}");
    }
}

#[test]
fn a_place_that_cannot_be_used_is_named() {
    let (root, _) = scene();
    let blocked = root.path().join("file");
    fs::write(&blocked, "").unwrap();
    for path in [PathBuf::from("job.address"), PathBuf::from("/"), root.path().join("no/such/job.address")] {
        let error = AddressFile::publish(&path, "a:1").unwrap_err();
        assert!(matches!(error, AddressFileError::Io { .. }), "{error}");
    }
    let error = AddressFile::publish(&blocked.join("job.address"), "a:1").unwrap_err();
    assert!(matches!(error, AddressFileError::Unsafe { .. }), "{error}");
}
