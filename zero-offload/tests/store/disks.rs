//! Disks that are full, go away or promise too much: file systems of their own, mounted for a test.

use std::env;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use rustix::thread::{CapabilitySet, capabilities};
use tempfile::TempDir;
use zero_core::Bytes;
use zero_offload::{Direction, Engine, NvmeStore, Pipeline, Slot, StoreError, Table};

use super::{content, engines, options, read};

/// A mounted file system; dropping it unmounts it, and gives back its loop device.
struct Disk(TempDir);

impl Disk {
    /// In memory. None, with the reason printed, where one may not mount.
    fn tmpfs(bytes: u64) -> Option<Self> {
        if !capabilities(None).unwrap().effective.contains(CapabilitySet::SYS_ADMIN) {
            println!("not tested: this process may not mount");
            return None;
        }
        Self::mount(&["-t", "tmpfs", "-o", &format!("size={bytes}"), "none"])
    }

    /// ext4 in a file of `folder`, which grows up to 16 MiB. None, with the reason printed, where one may not mount or
    /// has no loop devices.
    fn ext4(folder: &Path) -> Option<Self> {
        if let Err(error) = File::open("/dev/loop-control") {
            println!("not tested: no loop devices: {error}");
            return None;
        }
        let image = folder.join("ext4");
        File::create(&image).unwrap().set_len(16 << 20).unwrap();
        let image = image.to_str().unwrap();
        // No journal: its commits would come between, and the kernel gives up a file system whose journal fails.
        succeeds(Command::new("mkfs.ext4").args([
            "-q",
            "-b",
            "4096",
            "-m",
            "0",
            "-O",
            "^has_journal",
            image,
        ]))?;
        Self::mount(&["-o", "loop", image])
    }

    fn mount(arguments: &[&str]) -> Option<Self> {
        let directory = TempDir::new().unwrap();
        succeeds(Command::new("mount").args(arguments).arg(directory.path()))?;
        Some(Self(directory))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Takes all that is left.
    fn fill(&self) {
        let mut file = File::create(self.path().join("other")).unwrap();
        let error = io::copy(&mut io::repeat(1), &mut file).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }

    fn make_room(&self) {
        fs::remove_file(self.path().join("other")).unwrap();
    }

    /// Has the kernel write everything back.
    fn sync(&self) {
        rustix::fs::syncfs(File::open(self.path()).unwrap()).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let path = CString::new(self.path().as_os_str().as_bytes()).unwrap();
        // SAFETY: a text that lives until the call is over.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

/// None, with the reason printed, if the command fails; in CI, where the tools are installed, that is an error.
fn succeeds(command: &mut Command) -> Option<()> {
    let problem = match command.output() {
        Ok(output) if output.status.success() => return Some(()),
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    assert!(env::var("CI").as_deref() != Ok("true"), "{command:?}: {problem}");
    println!("not tested: {command:?}: {problem}");
    None
}

/// Runs a test with each engine, on a disk with an ext4 of its own, in a file on a disk of `backing` bytes in memory.
fn each(backing: u64, test: impl Fn(Engine, &Disk, &Disk)) {
    for engine in engines() {
        let Some(backing) = Disk::tmpfs(backing) else { return };
        let Some(disk) = Disk::ext4(backing.path()) else { return };
        test(engine, &disk, &backing);
    }
}

/// A tensor that has been written.
fn moment(store: &NvmeStore, bytes: usize) -> Slot {
    let mut slot = store.reserve("moment", bytes as u64).unwrap();
    slot.write(0, &content(bytes, 1)).unwrap();
    slot
}

/// Checks what an error names.
fn assert_failed(error: &StoreError, store: &NvmeStore, expected: Direction, errnos: &[i32]) {
    let StoreError::Io { direction, tensor, path, offset, length, source } = error else { panic!("{error}") };
    assert_eq!((*direction, tensor.as_str(), path), (expected, "moment", &store.path().join("data")));
    assert!(*length == 4096 && offset % 4096 == 0 && offset + 4096 <= store.reserved().get(), "{error}");
    assert!(source.raw_os_error().is_some_and(|errno| errnos.contains(&errno)), "{error}");
}

fn check_full(disk: &Disk, engine: Engine, direct: bool) {
    let store = NvmeStore::open(options(disk.path(), engine)).unwrap();
    assert!(store.direct() || !direct);
    // Twice this is two thirds of the disk.
    let bytes = (store.free().get() / 3) as usize / 4096 * 4096;
    let mut first = moment(&store, bytes);
    let left = store.free();
    let error = store.reserve("second", bytes as u64).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("`second`") && message.contains("make room"), "{message}");
    let StoreError::NoSpace { tensor, path, wanted, free } = error else { panic!("{error}") };
    assert_eq!((tensor.as_str(), wanted), ("second", Bytes::new(2 * bytes as u64)));
    assert_eq!(path, store.path().join("data"));
    assert!(free < wanted && free > Bytes::ZERO);
    // What it could have had is given back, but for a page in which ext4 notes where the file is.
    assert!(free == store.free() && free.get() + 4096 >= left.get());

    // Somebody else takes the rest: what is reserved can still be written.
    disk.fill();
    for seed in 2..4 {
        first.write(0, &content(bytes, seed)).unwrap();
        disk.sync();
        assert!(read(&first).unwrap() == content(bytes, seed));
    }
    disk.make_room();

    drop(first);
    let mut second = store.reserve("second", bytes as u64).unwrap();
    assert!(read(&second).unwrap() == vec![0; bytes]);
    second.write(0, &content(bytes, 4)).unwrap();
    assert!(read(&second).unwrap() == content(bytes, 4));
}

#[test]
fn a_full_disk_is_told_before_anything_is_written() {
    for engine in engines() {
        let Some(disk) = Disk::tmpfs(1 << 20) else { return };
        check_full(&disk, engine, false);
    }
    each(32 << 20, |engine, disk, _| check_full(disk, engine, true));
}

#[test]
fn a_disk_that_turns_read_only_keeps_what_it_has() {
    each(32 << 20, |engine, disk, _| {
        let store = NvmeStore::open(options(disk.path(), engine)).unwrap();
        let mut slot = moment(&store, 50_000);
        // As the kernel does when a file system is damaged.
        succeeds(Command::new("mount").args(["-o", "remount,abort"]).arg(disk.path())).unwrap();

        let error = slot.write(0, &content(50_000, 2)).unwrap_err();
        assert_failed(&error, &store, Direction::Write, &[libc::EROFS]);
        assert_eq!(read(&slot).unwrap(), content(50_000, 1));
        match store.reserve("second", 4096).unwrap_err() {
            StoreError::Reserve { tensor, path, wanted, source } => {
                assert_eq!((tensor.as_str(), wanted), ("second", Bytes::new(8192)));
                assert_eq!(path, store.path().join("data"));
                assert_eq!(source.raw_os_error(), Some(libc::EROFS));
            }
            error => panic!("{error}"),
        }
        assert_eq!(read(&slot).unwrap(), content(50_000, 1));
    });
}

#[test]
fn a_disk_that_goes_away_fails_every_transfer_by_name() {
    each(32 << 20, |engine, disk, _| {
        let store = NvmeStore::open(options(disk.path(), engine)).unwrap();
        let mut slot = moment(&store, 50_000);
        shut_down(disk);
        assert_failed(&read(&slot).unwrap_err(), &store, Direction::Read, &[libc::EIO]);
        let error = slot.write(0, &content(50_000, 2)).unwrap_err();
        assert_failed(&error, &store, Direction::Write, &[libc::EIO]);
    });
}

/// Has ext4 do nothing any more (`EXT4_IOC_SHUTDOWN`).
fn shut_down(disk: &Disk) {
    let without_flush = 2_u32;
    let directory = File::open(disk.path()).unwrap();
    // SAFETY: the request reads one number.
    let done =
        unsafe { libc::ioctl(directory.as_raw_fd(), libc::_IOR::<u32>(b'X'.into(), 125), &without_flush) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
}

#[test]
fn a_disk_that_promised_more_than_it_has_costs_nothing_that_was_written() {
    each(8 << 20, |engine, disk, backing| {
        let store = NvmeStore::open(options(disk.path(), engine)).unwrap();
        let mut slot = moment(&store, 50_000);
        let mut tables = [Table::reserve(&store, "layers.0", 10_000, &[("moment", 4)]).unwrap()];
        let mut pipeline = Pipeline::new(&store, Bytes::new(10 * 4096)).unwrap();
        let mut update = |tables: &mut [Table], value| {
            pipeline.update(tables, |tile| {
                tile.columns[0].fill(value);
                Ok::<_, StoreError>(())
            })
        };
        update(&mut tables, 1).unwrap();
        disk.sync();

        // The second places of all blocks have been reserved, but have never been written: nothing is behind them.
        backing.fill();
        let error = slot.write(0, &content(50_000, 2)).unwrap_err();
        assert_failed(&error, &store, Direction::Write, &[libc::ENOSPC, libc::EIO]);
        assert!(matches!(
            update(&mut tables, 2).unwrap_err(),
            StoreError::Io { direction: Direction::Write, tensor, .. } if tensor == "layers.0/moment"
        ));
        let read_column = |tables: &[Table]| read(tables[0].column(0).unwrap()).unwrap();
        assert_eq!(read(&slot).unwrap(), content(50_000, 1));
        assert_eq!(read_column(&tables), vec![1; 40_000]);

        backing.make_room();
        slot.write(0, &content(50_000, 3)).unwrap();
        update(&mut tables, 3).unwrap();
        assert_eq!(read(&slot).unwrap(), content(50_000, 3));
        assert_eq!(read_column(&tables), vec![3; 40_000]);
    });
}
