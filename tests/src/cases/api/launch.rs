//! Starts a control plane of its own for a run: loopback only, data in a temporary folder.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

/// Where pods would reach the API: nothing of a run goes there, and loopback is refused.
const ADVERTISE: &str = "192.0.2.1";
const READY_WITHIN: Duration = Duration::from_secs(20);
/// One look at whether the server reads its connections.
const ANSWERS_WITHIN: Duration = Duration::from_millis(500);

/// A running weir-control; ends with the value.
#[derive(Debug)]
pub(super) struct Launched {
    child: Child,
    pub(super) kubeconfig: PathBuf,
    _folder: tempfile::TempDir,
}

impl Launched {
    /// Starts the binary and waits until it is ready.
    ///
    /// # Errors
    /// When it does not start, with the end of its log.
    pub(super) fn start(binary: &Path) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let api = free_port()?;
        let feed = free_port()?;
        let config = folder.path().join("control.toml");
        let data = folder.path().join("data");
        std::fs::write(
            &config,
            format!(
                "data_dir = {data:?}\napi_listen = [\"127.0.0.1:{api}\"]\nadvertise = \"{ADVERTISE}:{api}\"\nfeed_listen = \"127.0.0.1:{feed}\"\n"
            ),
        )?;
        let log_path = folder.path().join("control.log");
        let log = std::fs::File::create(&log_path)?;
        let child = Command::new(binary)
            .args(["serve", "--config"])
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("start {}", binary.display()))?;
        let kubeconfig = folder.path().join("kubeconfig");
        let mut launched = Self {
            child,
            kubeconfig,
            _folder: folder,
        };
        launched.await_ready(binary, &config, api, &log_path)?;
        Ok(launched)
    }

    fn await_ready(
        &mut self,
        binary: &Path,
        config: &Path,
        port: u16,
        log: &Path,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        while !answers(port) {
            let ended = self.child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                let text = std::fs::read_to_string(log).unwrap_or_default();
                let tail: Vec<&str> = text.lines().rev().take(15).collect();
                let tail = tail.into_iter().rev().collect::<Vec<_>>().join("\n");
                anyhow::bail!("weir-control did not come up ({ended:?}):\n{tail}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let made = Command::new(binary)
            .args(["kubeconfig", "--config"])
            .arg(config)
            .args(["--server", &format!("https://127.0.0.1:{port}"), "--out"])
            .arg(&self.kubeconfig)
            .output()?;
        anyhow::ensure!(
            made.status.success(),
            "weir-control kubeconfig: {}",
            String::from_utf8_lossy(&made.stderr)
        );
        Ok(())
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        // It may have ended already; either way it is ours and reaped here.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Whether the server reads. Its port is open before its keys are made, so connecting is not enough: what is no TLS is
/// answered with an alert or the end of the connection.
fn answers(port: u16) -> bool {
    let Ok(mut stream) = std::net::TcpStream::connect(("127.0.0.1", port)) else {
        return false;
    };
    let prepared = stream
        .set_read_timeout(Some(ANSWERS_WITHIN))
        .and_then(|()| stream.write_all(b"GET / HTTP/1.0\r\n\r\n"));
    let read = prepared.and_then(|()| stream.read(&mut [0; 16]));
    !matches!(read, Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
}

fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
