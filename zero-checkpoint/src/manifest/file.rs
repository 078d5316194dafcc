//! A manifest as bytes: JSON whose last member is the hash of all before it.

use serde::Deserialize;

use crate::digest::Digest;
use crate::error::CheckpointError;
use crate::manifest::Manifest;

/// What the file is called.
pub(crate) const NAME: &str = "manifest.json";

/// The longest manifest that is read: 1 GiB, which hashes alone fill for 30 TB.
pub(crate) const MAX_BYTES: u64 = 1 << 30;

/// What stands between the hashed bytes and the hash.
const BEFORE: &str = ",\"hash\":\"";
/// What stands after it.
const AFTER: &str = "\"}\n";

/// All that is read of a manifest of any version.
#[derive(Deserialize)]
struct Version {
    format: String,
    format_version: u32,
}

impl Manifest {
    /// The file: JSON, and as its last member `hash`, of all bytes before the comma in front of it.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Strings, numbers, maps with strings as keys: nothing that JSON lacks.
        let mut bytes = serde_json::to_vec(self).unwrap_or_default();
        bytes.truncate(bytes.len().saturating_sub("}".len()));
        let digest = Digest::of(&bytes).to_string();
        [&bytes, BEFORE.as_bytes(), digest.as_bytes(), AFTER.as_bytes()].concat()
    }

    /// The file, if it can be read again; else why it could not.
    pub(crate) fn to_readable_bytes(&self) -> Result<Vec<u8>, String> {
        let bytes = self.to_bytes();
        if bytes.len() as u64 > MAX_BYTES {
            return Err(format!("its manifest has {} bytes, of {MAX_BYTES} allowed", bytes.len()));
        }
        match Self::from_bytes(&bytes, NAME) {
            Ok(_) => Ok(bytes),
            Err(CheckpointError::Manifest { reason, .. }) => {
                Err(format!("its manifest could not be read again: {reason}"))
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Why what it says could be written, but not read again, if so: JSON that is nested too deep.
    pub(crate) fn check_nesting(&self) -> Result<(), String> {
        let json = serde_json::to_vec(self).map_err(|error| error.to_string())?;
        serde_json::from_slice::<Self>(&json).map(drop).map_err(|error| error.to_string())
    }

    /// Reads and validates a file; `path` is what errors call it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Manifest`] if any byte is not what was written, or what was written makes no sense;
    /// [`NewerVersion`](CheckpointError::NewerVersion).
    pub fn from_bytes(bytes: &[u8], path: &str) -> Result<Self, CheckpointError> {
        let refused = |reason: String| CheckpointError::Manifest { path: path.to_owned(), reason };
        let body = body(bytes).map_err(refused)?;
        let json = [body, b"}"].concat();
        let not_json = |error: serde_json::Error| refused(error.to_string());
        let version: Version = serde_json::from_slice(&json).map_err(not_json)?;
        if version.format != Self::FORMAT {
            return Err(refused(format!("its format is `{}`, not `{}`", version.format, Self::FORMAT)));
        }
        if version.format_version > Self::VERSION {
            return Err(CheckpointError::NewerVersion {
                path: path.to_owned(),
                found: version.format_version,
                known: Self::VERSION,
            });
        }
        let manifest: Self = serde_json::from_slice(&json).map_err(not_json)?;
        manifest.validate().map_err(refused)?;
        Ok(manifest)
    }
}

/// The bytes that the hash at the end is of, if it is.
fn body(bytes: &[u8]) -> Result<&[u8], String> {
    let ending = "it does not end with its hash, so it was cut or written to";
    let rest = bytes.strip_suffix(AFTER.as_bytes()).ok_or(ending)?;
    let (rest, digest) = rest.len().checked_sub(Digest::DIGITS).map(|at| rest.split_at(at)).ok_or(ending)?;
    let body = rest.strip_suffix(BEFORE.as_bytes()).ok_or(ending)?;
    let found = Digest::of(body).to_string();
    if found.as_bytes() != digest {
        let claimed = String::from_utf8_lossy(digest);
        return Err(format!("its content has the hash {found}, but it claims {claimed}: it was changed"));
    }
    Ok(body)
}
