//! What the container runtime reads: the network configuration list, and the plugin's binary.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;

/// Name of the configuration file. Runtimes take the first in lexical order.
pub const CONF_NAME: &str = "10-weir.conflist";
/// Name of the plugin, as the configuration's `type` and as the file in the runtime's binary folder.
pub const PLUGIN_NAME: &str = "weir-cni";

/// A file for the runtime could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{action} {path}: {source}")]
pub struct ConfError {
    pub action: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

/// Writes the network configuration list, unless it is there already with these bytes. It stays when the agent ends.
///
/// # Errors
/// [`ConfError`] names the path.
pub fn write(conf_dir: &Path, socket: &Path, state_dir: &Path) -> Result<(), ConfError> {
    let list = json!({
        // Old versions of libcni read this key alone and refuse 1.1.0; newer ones take the highest of the list.
        "cniVersion": "1.0.0",
        "cniVersions": ["0.3.1", "0.4.0", "1.0.0", "1.1.0"],
        "name": "weir",
        "plugins": [{
            "type": PLUGIN_NAME, "socket": socket, "stateDir": state_dir,
            // What the runtime may ask for: host ports, addresses, limits.
            "capabilities": { "portMappings": true, "ips": true, "mac": true, "bandwidth": true },
        }],
    });
    let path = conf_dir.join(CONF_NAME);
    let mut text = format!("{list:#}");
    text.push('\n');
    if fs::read_to_string(&path).is_ok_and(|now| now == text) {
        return Ok(());
    }
    fs::create_dir_all(conf_dir).map_err(|source| ConfError {
        action: "create",
        path: conf_dir.into(),
        source,
    })?;
    replace(&path, 0o644, |file| file.write_all(text.as_bytes())).map_err(|source| ConfError {
        action: "write CNI configuration",
        path,
        source,
    })
}

/// Removes the configuration list; true when there was one.
///
/// # Errors
/// [`ConfError`] names the path.
pub fn remove(conf_dir: &Path) -> Result<bool, ConfError> {
    let path = conf_dir.join(CONF_NAME);
    match fs::remove_file(&path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(ConfError {
            action: "remove",
            path,
            source,
        }),
    }
}

/// Installs the plugin's binary, also over one that is just running.
///
/// # Errors
/// [`ConfError`] names the path.
pub fn install_plugin(from: &Path, bin_dir: &Path) -> Result<PathBuf, ConfError> {
    let mut source_file = File::open(from).map_err(|source| ConfError {
        action: "open",
        path: from.into(),
        source,
    })?;
    fs::create_dir_all(bin_dir).map_err(|source| ConfError {
        action: "create",
        path: bin_dir.into(),
        source,
    })?;
    let path = bin_dir.join(PLUGIN_NAME);
    replace(&path, 0o755, |file| {
        io::copy(&mut source_file, file).map(|_| ())
    })
    .map_err(|source| ConfError {
        action: "install",
        path: path.clone(),
        source,
    })?;
    Ok(path)
}

/// A dot-file in the same folder, then a rename: watchers see a whole file appear, and a busy binary is no obstacle.
fn replace(
    path: &Path,
    mode: u32,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.new"));
    // A leftover might be a running binary, which cannot be written to.
    let _ = fs::remove_file(&temporary);
    let write = || {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&temporary)?;
        fill(&mut file)?;
        file.sync_all()?;
        drop(file);
        fs::rename(&temporary, path)
    };
    let result = write();
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_written_once_and_leaves_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            write(
                dir.path(),
                Path::new("/run/weir/cni.sock"),
                Path::new("/var/lib/weir"),
            )
            .unwrap();
        }
        let names: Vec<_> = fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(names, [CONF_NAME]);
        let list: serde_json::Value =
            serde_json::from_slice(&fs::read(dir.path().join(CONF_NAME)).unwrap()).unwrap();
        assert_eq!(list["cniVersion"], "1.0.0");
        assert_eq!(list["plugins"][0]["type"], "weir-cni");
        assert!(remove(dir.path()).unwrap());
        assert!(!remove(dir.path()).unwrap());
    }

    #[test]
    fn the_plugin_is_installed_executable() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("built");
        fs::write(&from, "binary").unwrap();
        let to = install_plugin(&from, &dir.path().join("bin")).unwrap();
        let mode = fs::metadata(&to).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
    }
}
