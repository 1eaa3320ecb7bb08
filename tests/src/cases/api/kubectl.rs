//! The `kubectl` step: the real binary with a HOME of its own.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::expect::check_want;
use super::run::{Branch, Failure, seconds};
use super::vars::as_text;

/// A command without `max_s` that runs longer hangs.
const LONGEST_S: u64 = 180;
const POLL: Duration = Duration::from_millis(5);

struct Output {
    code: i32,
    stdout: String,
    stderr: String,
    took: Duration,
}

/// Runs kubectl once and checks what it printed.
///
/// # Errors
/// What differed, with the output.
pub(super) fn run(branch: &mut Branch, step: &Value) -> Result<(), Failure> {
    let output = execute(branch, step).map_err(|e| format!("run kubectl: {e}"))?;
    check(step, &output).map_err(|why| {
        let shown: String = output.stdout.chars().take(600).collect();
        let errors: String = output.stderr.chars().take(600).collect();
        format!(
            "{why}\n      exit {} stdout: {shown}\n      stderr: {errors}",
            output.code
        )
    })?;
    Ok(())
}

fn execute(branch: &Branch, step: &Value) -> std::io::Result<Output> {
    let shared = &branch.shared;
    let mut command = Command::new(&shared.server.kubectl);
    command
        .env("HOME", shared.home.path())
        .env("KUBECONFIG", &shared.kubeconfig)
        .current_dir(shared.home.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    for argument in step["args"].as_array().into_iter().flatten() {
        command.arg(as_text(argument));
    }
    if let Some(env) = step["env"].as_object() {
        command.envs(env.iter().map(|(k, v)| (k.clone(), as_text(v))));
    }
    let start = Instant::now();
    let mut child = command.spawn()?;
    let input = stdin_of(&step["stdin"]);
    let mut stdin = child.stdin.take();
    let feeder = std::thread::spawn(move || {
        if let Some(stdin) = stdin.as_mut() {
            // A command that does not read its input closes the pipe: that is its own affair.
            let _closed = stdin.write_all(input.as_bytes());
        }
    });
    let stdout = reader(child.stdout.take());
    let stderr = reader(child.stderr.take());
    let stop_after = (!step["stop_after_s"].is_null()).then(|| seconds(&step["stop_after_s"]));
    let longest = Duration::from_secs(LONGEST_S);
    let mut interrupted = false;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if !interrupted && stop_after.is_some_and(|s| start.elapsed() >= s) {
            interrupted = true;
            interrupt(&child);
        }
        if start.elapsed() > longest {
            child.kill()?;
        }
        std::thread::sleep(POLL);
    };
    let took = start.elapsed();
    let _fed = feeder.join();
    Ok(Output {
        code: status.code().unwrap_or(-1),
        stdout: stdout.join().unwrap_or_default(),
        stderr: stderr.join().unwrap_or_default(),
        took,
    })
}

fn interrupt(child: &std::process::Child) {
    if let Ok(pid) = i32::try_from(child.id()) {
        let pid = nix::unistd::Pid::from_raw(pid);
        // The child may have ended on its own just now.
        let _gone = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT);
    }
}

fn reader(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _partial = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn stdin_of(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(list) => list
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("\n---\n"),
        one => one.to_string(),
    }
}

fn check(step: &Value, output: &Output) -> Result<(), String> {
    if step["stop_after_s"].is_null() {
        let expected = step["exit"].as_i64().unwrap_or(0);
        if i64::from(output.code) != expected {
            return Err(format!("exit code {}, expected {expected}", output.code));
        }
    }
    if !step["max_s"].is_null() && output.took > seconds(&step["max_s"]) {
        return Err(format!(
            "took {:?}, at most {} s allowed",
            output.took, step["max_s"]
        ));
    }
    if let Some(expected) = step["stdout"].as_str()
        && output.stdout.trim_end() != expected.trim_end()
    {
        return Err(format!("stdout differs from {expected:?}"));
    }
    for (key, text, wanted) in [
        ("stdout_has", &output.stdout, true),
        ("stdout_not", &output.stdout, false),
        ("stderr_has", &output.stderr, true),
        ("stderr_not", &output.stderr, false),
    ] {
        for part in step[key].as_array().into_iter().flatten() {
            if text.contains(&as_text(part)) != wanted {
                return Err(format!("{key} {part} does not hold"));
            }
        }
    }
    for pattern in step["stdout_re"].as_array().into_iter().flatten() {
        let regex = regex::Regex::new(&as_text(pattern)).map_err(|e| e.to_string())?;
        if !regex.is_match(&output.stdout) {
            return Err(format!("stdout_re {pattern} does not hold"));
        }
    }
    if !step["want"].is_null() {
        let json: Value =
            serde_json::from_str(&output.stdout).map_err(|e| format!("stdout is not JSON: {e}"))?;
        check_want(&step["want"], &json)?;
    }
    Ok(())
}
