//! Reads a container's log file to a stream of bytes: from a line near the end, on while the container writes.

use std::future::Future;
use std::io::SeekFrom;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio::sync::mpsc;

use super::line::{Shaper, Wanted};

const READ_BYTES: usize = 32 << 10;
/// How often a followed file is looked at: its writer is another process that does not tell.
const FOLLOW_PERIOD: Duration = Duration::from_millis(100);

/// What to read.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) path: PathBuf,
    pub(crate) wanted: Wanted,
    /// Only the last so many entries.
    pub(crate) tail: Option<u64>,
    pub(crate) follow: bool,
}

/// Sends the log until it ends: at the file's end, or when followed, once `is_running` says that nobody writes any more
/// and the rest is sent. Returns early when the receiver is gone.
pub(crate) async fn send<F>(
    request: Request,
    is_running: impl Fn() -> F,
    to: &mpsc::Sender<Vec<u8>>,
) -> std::io::Result<()>
where
    F: Future<Output = bool>,
{
    let mut file = File::open(&request.path).await?;
    if let Some(lines) = request.tail {
        let start = tail_start(&mut file, lines).await?;
        file.seek(SeekFrom::Start(start)).await?;
    }
    let mut shaper = Shaper::new(request.wanted);
    let mut last_look = false;
    loop {
        if !drain(&mut file, &mut shaper, to).await? {
            return Ok(());
        }
        if !request.follow {
            return Ok(());
        }
        // Asked before the file is read once more, so that the last lines are not missed.
        if let Some(next) = reopened(&file, &request.path).await {
            drain(&mut file, &mut shaper, to).await?;
            file = next;
            continue;
        }
        if last_look {
            return Ok(());
        }
        last_look = !is_running().await;
        if !last_look {
            tokio::select! {
                () = to.closed() => return Ok(()),
                () = tokio::time::sleep(FOLLOW_PERIOD) => {}
            }
        }
    }
}

/// Sends what the file has now. False when nothing more is wanted.
async fn drain(
    file: &mut File,
    shaper: &mut Shaper,
    to: &mpsc::Sender<Vec<u8>>,
) -> std::io::Result<bool> {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let count = file.read(&mut buffer).await?;
        if count == 0 {
            return Ok(!to.is_closed());
        }
        let mut output = Vec::with_capacity(count);
        shaper.push(&buffer[..count], &mut output);
        if !output.is_empty() && to.send(output).await.is_err() {
            return Ok(false);
        }
        if shaper.is_full() {
            return Ok(false);
        }
    }
}

/// The file that has taken this one's place, when the log was rotated.
async fn reopened(file: &File, path: &Path) -> Option<File> {
    use std::os::unix::fs::MetadataExt;
    let held = file.metadata().await.ok()?.ino();
    let next = File::open(path).await.ok()?;
    (next.metadata().await.ok()?.ino() != held).then_some(next)
}

/// Where the last `lines` entries begin.
async fn tail_start(file: &mut File, lines: u64) -> std::io::Result<u64> {
    let end = file.seek(SeekFrom::End(0)).await?;
    let mut at = end;
    let mut seen = 0;
    if lines == 0 {
        return Ok(end);
    }
    let mut buffer = vec![0; READ_BYTES];
    while at > 0 {
        let count = at.min(READ_BYTES as u64);
        at -= count;
        let piece = &mut buffer[..usize::try_from(count).unwrap_or(READ_BYTES)];
        file.seek(SeekFrom::Start(at)).await?;
        file.read_exact(piece).await?;
        for (offset, _) in piece.iter().enumerate().rev().filter(|(_, b)| **b == b'\n') {
            let after = at + offset as u64 + 1;
            // The newline that ends the last entry starts none.
            if after == end {
                continue;
            }
            seen += 1;
            if seen == lines {
                return Ok(after);
            }
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn entry(text: &str) -> String {
        format!("2026-01-02T03:04:05Z stdout F {text}\n")
    }

    async fn all(request: Request) -> String {
        let (to, mut from) = mpsc::channel(16);
        let sending = tokio::spawn(async move { send(request, async || false, &to).await });
        let mut text = Vec::new();
        while let Some(bytes) = from.recv().await {
            text.extend(bytes);
        }
        sending.await.unwrap().unwrap();
        String::from_utf8(text).unwrap()
    }

    #[tokio::test]
    async fn the_tail_is_found_over_block_borders() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let long = "x".repeat(READ_BYTES);
        let text: String = ["a", &long, "b", "c"].iter().map(|t| entry(t)).collect();
        std::fs::write(&path, text).unwrap();
        let request = |tail| Request {
            path: path.clone(),
            wanted: Wanted::default(),
            tail,
            follow: false,
        };
        assert_eq!(all(request(Some(2))).await, "b\nc\n");
        assert_eq!(all(request(Some(3))).await, format!("{long}\nb\nc\n"));
        assert_eq!(all(request(Some(0))).await, "");
        assert_eq!(all(request(Some(99))).await, all(request(None)).await);
    }

    #[tokio::test]
    async fn following_goes_on_over_a_rotation_to_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, entry("one")).unwrap();
        let running = Arc::new(AtomicBool::new(true));
        let (to, mut from) = mpsc::channel(16);
        let request = Request {
            path: path.clone(),
            wanted: Wanted::default(),
            tail: None,
            follow: true,
        };
        let alive = Arc::clone(&running);
        let sending = tokio::spawn(async move {
            let is_running = || std::future::ready(alive.load(Ordering::SeqCst));
            send(request, is_running, &to).await
        });
        assert_eq!(from.recv().await.unwrap(), b"one\n");
        let mut old = std::fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap();
        old.write_all(entry("two").as_bytes()).unwrap();
        std::fs::rename(&path, dir.path().join("0.log.1")).unwrap();
        std::fs::write(&path, entry("three")).unwrap();
        assert_eq!(from.recv().await.unwrap(), b"two\n");
        assert_eq!(from.recv().await.unwrap(), b"three\n");
        let mut new = std::fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap();
        new.write_all(entry("four").as_bytes()).unwrap();
        running.store(false, Ordering::SeqCst);
        assert_eq!(from.recv().await.unwrap(), b"four\n");
        assert_eq!(from.recv().await, None);
        sending.await.unwrap().unwrap();
    }
}
