//! `cargo xtask tidy`: what the compiler does not check. Rooms stay pure, files short, dependencies one-way, and the
//! tree free of stubs, machine paths and registry hosts.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::repo::Repo;
use crate::run::{capture, output};
use crate::test::Counts;

/// Longest source file, in lines.
const MAX_LINES: usize = 800;

/// The only entries of the top level, besides dot-files.
const TOP_LEVEL: [&str; 13] = [
    "ARCHITECTURE.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "agent",
    "cni-plugin",
    "clippy.toml",
    "control",
    "dataplane-ebpf",
    "rustfmt.toml",
    "tests",
    "xtask",
];

/// Rooms that do no I/O and read no clock; a path is a folder or one file.
const PURE: [&str; 13] = [
    "dataplane-ebpf/common/src",
    "control/api/src",
    "control/src/apiserver/admission",
    "control/src/apiserver/codec",
    "control/src/apiserver/defaults",
    "control/src/apiserver/openapi",
    "control/src/apiserver/patch",
    "control/src/apiserver/schema",
    "control/src/apiserver/tables",
    "control/src/apiserver/validation",
    "control/src/scheduler/core",
    "agent/src/compile",
    "agent/src/plan",
];

/// What a pure room must not name.
const IMPURE: [&str; 19] = [
    "std::fs",
    "std::env",
    "std::process",
    "std::thread",
    "std::os::",
    "std::io",
    "TcpStream",
    "TcpListener",
    "UdpSocket",
    "UnixStream",
    "Instant::now",
    "SystemTime",
    "Timestamp::now",
    "tokio::",
    "rand::",
    "nix::",
    "libc::",
    "aya::",
    "rtnetlink::",
];

/// Which crates of ours a crate may depend on.
const MAY_DEPEND: [(&str, &[&str]); 6] = [
    ("dataplane-ebpf/common", &[]),
    ("control/api", &[]),
    ("control/feed", &["control-api"]),
    ("control", &["control-api", "control-feed"]),
    (
        "agent",
        &["control-api", "control-feed", "dataplane-common"],
    ),
    ("cni-plugin", &[]),
];
const OURS: [&str; 6] = [
    "control-api",
    "control-feed",
    "dataplane-common",
    "weir-agent",
    "weir-cni",
    "weir-control",
];

/// Unfinished work, spelt so that this file does not name it.
const STUBS: [&str; 5] = [
    concat!("to", "do!("),
    concat!("unimple", "mented!("),
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
];
/// Folders of build machines.
const MACHINE_PATHS: [&str; 4] = [
    concat!("/wo", "rk/"),
    concat!("/fa", "rm/"),
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
];
/// Hosts of package registries: what they serve is named by package, never by address.
const REGISTRIES: [&str; 6] = [
    "debian",
    "crates",
    "npmjs",
    "pypi",
    "pythonhosted",
    "golang",
];

/// Runs every check; prints what is wrong.
pub(crate) fn run(repo: &Repo) -> Result<Counts> {
    let files = tracked(repo)?;
    let mut counts = Counts::default();
    let mut check = |name: &str, problems: Vec<String>| {
        if problems.is_empty() {
            counts.passed += 1;
            println!(" ✓ {name}");
        } else {
            counts.failed += 1;
            println!(" ✗ {name}");
            for problem in problems {
                println!("     {problem}");
            }
        }
    };
    check("only the agreed top-level entries", top_level(&files));
    check("files of at most 800 lines", too_long(repo, &files)?);
    check(
        "pure rooms do no I/O and read no clock",
        impure(repo, &files)?,
    );
    check("crates depend one way", dependencies(repo)?);
    check("only agent and tests name aya", aya_users(repo, &files)?);
    check(
        "no stubs, machine paths, registry hosts or ignored tests without reason",
        text(repo, &files)?,
    );
    check("rustfmt", tool(repo, &["fmt", "--all", "--", "--check"])?);
    let clippy = [
        "clippy",
        "--quiet",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ];
    check("clippy", tool(repo, &clippy)?);
    Ok(counts)
}

/// Files of the tree as git knows them.
fn tracked(repo: &Repo) -> Result<Vec<PathBuf>> {
    let mut git = Command::new("git");
    git.arg("-C").arg(&repo.root).args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]);
    let said = output(&mut git).context("list the tree's files (tidy needs git)")?;
    let exists = |p: &PathBuf| repo.root.join(p).is_file();
    Ok(said
        .split('\0')
        .filter(|p| !p.is_empty())
        .map(PathBuf::from)
        .filter(exists)
        .collect())
}

fn top_level(files: &[PathBuf]) -> Vec<String> {
    let mut problems: Vec<String> = files
        .iter()
        .filter_map(|f| f.components().next())
        .map(|c| c.as_os_str().to_string_lossy().into_owned())
        .filter(|top| !top.starts_with('.') && !TOP_LEVEL.contains(&top.as_str()))
        .map(|top| format!("{top}: not an agreed top-level entry"))
        .collect();
    problems.sort();
    problems.dedup();
    problems
}

fn has_extension(file: &Path, extensions: &[&str]) -> bool {
    file.extension()
        .is_some_and(|e| extensions.iter().any(|x| e == *x))
}

fn read(repo: &Repo, file: &Path) -> Result<String> {
    let bytes =
        std::fs::read(repo.root.join(file)).with_context(|| format!("read {}", file.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn too_long(repo: &Repo, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for file in files
        .iter()
        .filter(|f| has_extension(f, &["rs", "proto", "ts", "sh"]))
    {
        let lines = read(repo, file)?.lines().count();
        if lines > MAX_LINES {
            problems.push(format!("{}: {lines} lines", file.display()));
        }
    }
    Ok(problems)
}

fn impure(repo: &Repo, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for file in files.iter().filter(|f| has_extension(f, &["rs"])) {
        let pure = PURE
            .iter()
            .any(|room| file.starts_with(room) || file.to_string_lossy() == format!("{room}.rs"));
        if !pure || file.file_name().is_some_and(|n| n == "tests.rs") {
            continue;
        }
        for (number, line) in product_lines(&read(repo, file)?) {
            if let Some(word) = IMPURE.iter().find(|word| names(&line, word)) {
                problems.push(format!("{}:{number}: {word}", file.display()));
            }
        }
    }
    Ok(problems)
}

/// Numbered lines without comments, up to the file's own tests.
fn product_lines(text: &str) -> Vec<(usize, String)> {
    text.lines()
        .enumerate()
        .take_while(|(_, line)| !line.trim_start().starts_with("#[cfg(test)]"))
        .map(|(i, line)| {
            (
                i + 1,
                line.split("//").next().unwrap_or_default().to_owned(),
            )
        })
        .collect()
}

/// Whether the line has the word where a longer identifier does not merely end in it.
fn names(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line.get(..at).and_then(|b| b.chars().next_back());
        !before.is_some_and(|c| c.is_alphanumeric() || c == '_')
    })
}

fn dependencies(repo: &Repo) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for (room, allowed) in MAY_DEPEND {
        let manifest: toml::Table =
            toml::from_str(&read(repo, &Path::new(room).join("Cargo.toml"))?)
                .with_context(|| format!("parse {room}/Cargo.toml"))?;
        let Some(table) = manifest.get("dependencies").and_then(|d| d.as_table()) else {
            continue;
        };
        for name in table.keys().filter(|n| OURS.contains(&n.as_str())) {
            if !allowed.contains(&name.as_str()) {
                problems.push(format!("{room} must not depend on {name}"));
            }
        }
    }
    Ok(problems)
}

fn aya_users(repo: &Repo, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for file in files.iter().filter(|f| has_extension(f, &["rs"])) {
        let free = ["agent", "tests", "dataplane-ebpf/src"]
            .iter()
            .any(|r| file.starts_with(r));
        if free || file.starts_with("xtask") {
            continue;
        }
        for (number, line) in product_lines(&read(repo, file)?) {
            if names(&line, "aya::") {
                problems.push(format!("{}:{number}: aya", file.display()));
            }
        }
    }
    Ok(problems)
}

fn text(repo: &Repo, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for file in files {
        if file.file_name().is_some_and(|n| n == "Cargo.lock") || file.starts_with("LICENSE") {
            continue;
        }
        let rust = has_extension(file, &["rs"]);
        for (i, line) in read(repo, file)?.lines().enumerate() {
            if let Some(what) = line_problem(line, rust) {
                problems.push(format!("{}:{}: {what}", file.display(), i + 1));
            }
        }
    }
    Ok(problems)
}

/// What a single line must not hold.
fn line_problem(line: &str, rust: bool) -> Option<String> {
    if rust {
        if let Some(stub) = STUBS.iter().find(|s| names(line, s)) {
            return Some(format!("unfinished: {stub}"));
        }
        if line.trim_start().starts_with("#[ignore") && !line.contains("= \"") {
            return Some("an ignored test without a reason".into());
        }
    }
    if let Some(path) = MACHINE_PATHS.iter().find(|p| has_path(line, p)) {
        return Some(format!("path of a machine: {path}"));
    }
    registry_host(line).map(|host| format!("host of a registry: {host}"))
}

/// Whether the line has a path that begins with the folder.
fn has_path(line: &str, folder: &str) -> bool {
    line.match_indices(folder).any(|(at, _)| {
        let before = line.get(..at).and_then(|b| b.chars().next_back());
        !before.is_some_and(|c| c.is_alphanumeric() || "._-~}*)".contains(c))
    })
}

fn registry_host(line: &str) -> Option<String> {
    line.match_indices("://").find_map(|(at, mark)| {
        let rest = line.get(at + mark.len()..)?;
        let host = rest.split(['/', '"', ' ', ')', '>', '`']).next()?;
        REGISTRIES
            .iter()
            .any(|r| host.contains(r))
            .then(|| host.to_owned())
    })
}

/// A cargo subcommand as a check; a toolchain without it cannot fail it.
fn tool(repo: &Repo, args: &[&str]) -> Result<Vec<String>> {
    let name = args.first().copied().unwrap_or_default();
    if !crate::run::succeeds(repo.cargo().args([name, "--version"])) {
        println!(" - {name} is not installed in this toolchain: skipped");
        return Ok(Vec::new());
    }
    let out = capture(repo.cargo().args(args))?;
    if out.status.success() {
        return Ok(Vec::new());
    }
    let said = [out.stdout, out.stderr].concat();
    Ok(String::from_utf8_lossy(&said)
        .lines()
        .map(str::to_owned)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impure_words_are_found_as_words_only() {
        assert!(names("use std::fs;", "std::fs"));
        assert!(names("let x = tokio::spawn(f);", "tokio::"));
        assert!(!names("use my_tokio::x;", "tokio::"));
        assert!(!names("operand::new()", "rand::"));
    }

    #[test]
    fn tests_and_comments_of_a_pure_file_are_exempt() {
        let lines = product_lines("a // std::fs\n#[cfg(test)]\nuse std::fs;\n");
        assert_eq!(lines, [(1, "a ".to_owned())]);
    }

    #[test]
    fn stubs_paths_hosts_and_bare_ignores_are_problems() {
        for line in [
            concat!("    to", "do!()"),
            concat!("// TO", "DO later"),
            "#[ignore]",
            concat!("open(\"/wo", "rk/x\")"),
            concat!("https://deb.deb", "ian.org/x"),
        ] {
            assert!(line_problem(line, true).is_some(), "{line}");
        }
        for line in [
            "#[ignore = \"needs root\"]",
            "see https://kubernetes.io/docs",
            "a/work/b",
        ] {
            assert!(line_problem(line, true).is_none(), "{line}");
        }
    }

    #[test]
    fn an_unknown_top_level_folder_is_a_problem() {
        let files = ["scripts/x.sh", "agent/a.rs", ".ci/run"].map(PathBuf::from);
        assert_eq!(top_level(&files).len(), 1);
    }
}
