//! The key of one user on one host: 32 random bytes in a file with mode 600. Without a token it
//! proves that a peer runs as the same user, over transports where the kernel does not report the
//! peer's user.

use std::path::Path;

use rustix::{
    fs::{self, AtFlags, FileType, Mode, OFlags, RenameFlags, CWD},
    io::Errno,
};

use super::messages::Digest;
use crate::domain::DomainError;

const FOLDER: &str = "/dev/shm";

/// Reads the key; creates it if it is missing. Each handshake reads it again, so that engines agree
/// on one key after the folder was cleaned.
///
/// # Errors
/// [`DomainError::Unavailable`] if the file cannot be created or other users may know it.
pub(super) fn user_key() -> Result<Digest, DomainError> {
    key_in(Path::new(FOLDER))
}

fn key_in(folder: &Path) -> Result<Digest, DomainError> {
    let user = rustix::process::geteuid();
    let path = folder.join(format!("fabric-ray-{}-key", user.as_raw()));
    let failed = |call: &str, e: Errno| match e {
        Errno::MFILE | Errno::NFILE => DomainError::Io { call: "open of the user's key", errno: e },
        e => DomainError::Unavailable(format!(
            "without a token peers prove their user by {}: {call}: {e}; set a token",
            path.display()
        )),
    };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = match fs::open(&path, flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            make(folder, &path).map_err(|e| failed("cannot be made", e))?;
            fs::open(&path, flags, Mode::empty())
        }
        opened => opened,
    }
    .map_err(|e| failed("open", e))?;
    let stat = fs::fstat(&file).map_err(|e| failed("fstat", e))?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !is_file || stat.st_uid != user.as_raw() || stat.st_mode & 0o077 != 0 {
        return Err(DomainError::Unavailable(format!(
            "{}: got owner {} and mode {:o}, expected a file of user {} with mode 600; remove it \
             or set a token",
            path.display(),
            stat.st_uid,
            stat.st_mode & 0o7777,
            user.as_raw(),
        )));
    }
    let mut bytes = [0; size_of::<Digest>() + 1];
    let n = rustix::io::read(&file, &mut bytes).map_err(|e| failed("read", e))?;
    let key = bytes[..n].try_into().map_err(|_| {
        let (path, wanted) = (path.display(), size_of::<Digest>());
        DomainError::Unavailable(format!("{path}: got {n} bytes, expected {wanted}; remove it"))
    })?;
    Ok(key)
}

/// Creates the key file. If several processes race, the first file wins.
fn make(folder: &Path, path: &Path) -> Result<(), Errno> {
    let random = |bytes: &mut [u8]| getrandom::fill(bytes).map_err(|_| Errno::IO);
    let (mut key, mut name): (Digest, [u8; 8]) = Default::default();
    random(&mut key)?;
    random(&mut name)?;
    let draft = folder.join(format!("fabric-ray-key-{:016x}", u64::from_le_bytes(name)));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = fs::open(&draft, flags, Mode::RUSR | Mode::WUSR)?;
    let made = match rustix::io::write(&file, &key) {
        Ok(n) if n == key.len() => {
            fs::renameat_with(CWD, &draft, CWD, path, RenameFlags::NOREPLACE)
        }
        Ok(_) => Err(Errno::NOSPC),
        Err(e) => Err(e),
    };
    if made.is_err() {
        let _ = fs::unlinkat(CWD, &draft, AtFlags::empty());
    }
    match made {
        Err(Errno::EXIST) => Ok(()),
        made => made,
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf};

    use super::*;

    struct TestFolder(PathBuf);

    impl TestFolder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn key(&self) -> PathBuf {
            let user = rustix::process::geteuid().as_raw();
            self.0.join(format!("fabric-ray-{user}-key"))
        }
    }

    impl Drop for TestFolder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn concurrent_readers_get_one_key() {
        let folder = TestFolder::new("keys");
        let ask = || key_in(&folder.0).unwrap();
        let keys: Vec<Digest> = std::thread::scope(|s| {
            let all: Vec<_> = (0..8).map(|_| s.spawn(ask)).collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|k| *k == keys[0] && *k != [0; 32]));
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1, "a draft was left");
        assert_eq!(fs::metadata(folder.key()).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn ic_2_a_key_that_others_may_know_is_refused() {
        let folder = TestFolder::new("open-keys");
        key_in(&folder.0).unwrap();
        fs::set_permissions(folder.key(), fs::Permissions::from_mode(0o640)).unwrap();
        let said = key_in(&folder.0).unwrap_err().to_string();
        assert!(said.contains("mode 640, expected a file of user"), "{said}");
        fs::remove_file(folder.key()).unwrap();
        std::os::unix::fs::symlink("/dev/zero", folder.key()).unwrap();
        assert!(key_in(&folder.0).is_err(), "a link was followed");
        fs::remove_file(folder.key()).unwrap();
        fs::write(folder.key(), [7; 31]).unwrap();
        fs::set_permissions(folder.key(), fs::Permissions::from_mode(0o600)).unwrap();
        let said = key_in(&folder.0).unwrap_err().to_string();
        assert!(said.contains("got 31 bytes, expected 32"), "{said}");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(folder.key(), Some(65534), None).unwrap();
            let said = key_in(&folder.0).unwrap_err().to_string();
            assert!(said.contains("got owner 65534"), "{said}");
        }
        let said = key_in(Path::new("/nowhere")).unwrap_err().to_string();
        assert!(said.contains("set a token"), "{said}");
    }
}
