//! The binary against the CNI specification: what a runtime sees, without an agent or with a scripted one.
#![allow(clippy::unwrap_used, reason = "a test may stop at any surprise")]

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

struct Outcome {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Outcome {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {:?}", self.stdout))
    }

    fn error_code(&self) -> u64 {
        assert_eq!(self.code, 1, "errors exit with 1: {}", self.stdout);
        let error = self.json();
        assert!(
            error["msg"].as_str().is_some_and(|m| !m.is_empty()),
            "{error}"
        );
        assert!(error["cniVersion"].is_string(), "{error}");
        error["code"].as_u64().unwrap()
    }
}

fn run(env: &[(&str, &str)], stdin: &[u8]) -> Outcome {
    let mut child = Command::new(env!("CARGO_BIN_EXE_weir-cni"))
        .env_clear()
        .envs(env.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A plugin that answers without reading stdin closes the pipe: that is allowed.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    let output = child.wait_with_output().unwrap();
    Outcome {
        code: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

const ID: (&str, &str) = ("CNI_CONTAINERID", "c1");
const IF: (&str, &str) = ("CNI_IFNAME", "eth0");
const NS: (&str, &str) = ("CNI_NETNS", "/proc/self/ns/net");

fn config(version: &str, dir: &Path) -> Vec<u8> {
    json!({
        "cniVersion": version,
        "name": "weir",
        "type": "weir-cni",
        "socket": dir.join("cni.sock"),
        "stateDir": dir,
    })
    .to_string()
    .into_bytes()
}

#[test]
fn without_a_command_it_tells_about_itself() {
    let out = run(&[], b"");
    assert_eq!((out.code, out.stdout.as_str()), (0, ""));
    assert!(out.stderr.contains("1.1.0"), "{}", out.stderr);
}

#[test]
fn version_ignores_stdin() {
    for stdin in ["", "{", r#"{"cniVersion":"9.9.9"}"#] {
        let out = run(&[("CNI_COMMAND", "VERSION")], stdin.as_bytes());
        assert_eq!(out.code, 0);
        assert_eq!(
            out.json()["supportedVersions"],
            json!(["0.3.1", "0.4.0", "1.0.0", "1.1.0"])
        );
    }
}

#[test]
#[allow(clippy::too_many_lines, reason = "one table")]
fn bad_input_gets_the_code_of_the_specification() {
    let dir = tempfile::tempdir().unwrap();
    let good = String::from_utf8(config("1.0.0", dir.path())).unwrap();
    let long_id = "x".repeat(200);
    type Row<'a> = (&'a str, Vec<(&'a str, &'a str)>, &'a str, u64, &'a str);
    let rows: Vec<Row<'_>> = vec![
        (
            "unknown command",
            vec![("CNI_COMMAND", "NOPE")],
            &good,
            4,
            "NOPE",
        ),
        (
            "lower case",
            vec![("CNI_COMMAND", "add"), ID, IF, NS],
            &good,
            4,
            "add",
        ),
        (
            "nothing set",
            vec![("CNI_COMMAND", "ADD")],
            &good,
            4,
            "CNI_CONTAINERID, CNI_NETNS, CNI_IFNAME",
        ),
        (
            "no netns",
            vec![("CNI_COMMAND", "ADD"), ID, IF],
            &good,
            4,
            "CNI_NETNS",
        ),
        (
            "DEL without id",
            vec![("CNI_COMMAND", "DEL"), IF],
            &good,
            4,
            "CNI_CONTAINERID",
        ),
        (
            "id with slash",
            vec![("CNI_COMMAND", "DEL"), ("CNI_CONTAINERID", "../x"), IF],
            &good,
            4,
            "../x",
        ),
        (
            "id too long",
            vec![("CNI_COMMAND", "DEL"), ("CNI_CONTAINERID", &long_id), IF],
            &good,
            4,
            "128",
        ),
        (
            "ifname of 16",
            vec![
                ("CNI_COMMAND", "DEL"),
                ID,
                ("CNI_IFNAME", "abcdefghijklmnop"),
            ],
            &good,
            4,
            "15",
        ),
        (
            "ifname ..",
            vec![("CNI_COMMAND", "DEL"), ID, ("CNI_IFNAME", "..")],
            &good,
            4,
            "..",
        ),
        (
            "ifname colon",
            vec![("CNI_COMMAND", "DEL"), ID, ("CNI_IFNAME", "a:b")],
            &good,
            4,
            "a:b",
        ),
        (
            "ifname space",
            vec![("CNI_COMMAND", "DEL"), ID, ("CNI_IFNAME", "a b")],
            &good,
            4,
            "a b",
        ),
        (
            "args",
            vec![("CNI_COMMAND", "ADD"), ID, IF, NS, ("CNI_ARGS", "A")],
            &good,
            4,
            "CNI_ARGS",
        ),
        (
            "netns gone",
            vec![("CNI_COMMAND", "ADD"), ID, IF, ("CNI_NETNS", "/no/ns")],
            &good,
            4,
            "/no/ns",
        ),
        (
            "broken JSON",
            vec![("CNI_COMMAND", "ADD"), ID, IF, NS],
            "{\"name\":",
            6,
            "stdin",
        ),
        (
            "empty stdin",
            vec![("CNI_COMMAND", "ADD"), ID, IF, NS],
            "",
            6,
            "stdin",
        ),
        (
            "a list",
            vec![("CNI_COMMAND", "ADD"), ID, IF, NS],
            "[]",
            6,
            "stdin",
        ),
        (
            "wrong type",
            vec![("CNI_COMMAND", "ADD"), ID, IF, NS],
            r#"{"name":"w","cniVersion":1}"#,
            6,
            "stdin",
        ),
        (
            "no name",
            vec![("CNI_COMMAND", "ADD"), ID, IF, NS],
            r#"{"cniVersion":"1.0.0"}"#,
            7,
            "name",
        ),
        (
            "bad name",
            vec![("CNI_COMMAND", "ADD"), ID, IF, NS],
            r#"{"cniVersion":"1.0.0","name":"a/b"}"#,
            7,
            "a/b",
        ),
        (
            "no version",
            vec![("CNI_COMMAND", "ADD"), ID, IF, NS],
            r#"{"name":"weir"}"#,
            1,
            "0.1.0",
        ),
        (
            "future version",
            vec![("CNI_COMMAND", "ADD"), ID, IF, NS],
            r#"{"name":"weir","cniVersion":"2.0.0"}"#,
            1,
            "2.0.0",
        ),
        (
            "interface made by an earlier plugin",
            vec![("CNI_COMMAND", "ADD"), ID, IF, NS],
            r#"{"name":"weir","cniVersion":"1.0.0","prevResult":{"interfaces":[{"name":"eth0","sandbox":"/n"}]}}"#,
            7,
            "eth0",
        ),
        (
            "IPAM plugin outside of its folder",
            vec![("CNI_COMMAND", "ADD"), ID, IF, NS],
            r#"{"name":"weir","cniVersion":"1.0.0","ipam":{"type":"../sh"}}"#,
            7,
            "../sh",
        ),
        (
            "IPAM plugin that is not there",
            vec![
                ("CNI_COMMAND", "ADD"),
                ID,
                IF,
                NS,
                ("CNI_PATH", "/no:/none"),
            ],
            r#"{"name":"weir","cniVersion":"1.0.0","ipam":{"type":"host-local"}}"#,
            4,
            "host-local",
        ),
        (
            "CHECK in 0.3.1",
            vec![("CNI_COMMAND", "CHECK"), ID, IF, NS],
            r#"{"name":"weir","cniVersion":"0.3.1"}"#,
            1,
            "CHECK",
        ),
        (
            "STATUS in 1.0.0",
            vec![("CNI_COMMAND", "STATUS")],
            r#"{"name":"weir","cniVersion":"1.0.0"}"#,
            1,
            "STATUS",
        ),
        (
            "GC in 1.0.0",
            vec![("CNI_COMMAND", "GC")],
            r#"{"name":"weir","cniVersion":"1.0.0"}"#,
            1,
            "GC",
        ),
        (
            "GC without list",
            vec![("CNI_COMMAND", "GC")],
            r#"{"name":"weir","cniVersion":"1.1.0"}"#,
            7,
            "valid-attachments",
        ),
        (
            "CHECK without prevResult",
            vec![("CNI_COMMAND", "CHECK"), ID, IF, NS],
            &good,
            7,
            "prevResult",
        ),
    ];
    for (what, env, stdin, code, mentions) in rows {
        let out = run(&env, stdin.as_bytes());
        assert_eq!(out.error_code(), code, "{what}: {}", out.stdout);
        assert!(
            out.stdout.contains(mentions),
            "{what}: {} lacks {mentions}",
            out.stdout
        );
    }
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        0,
        "bad input leaves nothing behind"
    );
}

#[test]
fn oversized_configuration_is_refused() {
    let huge = vec![b' '; 2 * 1024 * 1024];
    let out = run(&[("CNI_COMMAND", "ADD"), ID, IF, NS], &huge);
    assert_eq!(out.error_code(), 7);
}

#[test]
fn errors_answer_in_the_version_asked() {
    let out = run(
        &[("CNI_COMMAND", "ADD"), ID, IF, NS],
        br#"{"cniVersion":"0.4.0"}"#,
    );
    assert_eq!(out.json()["cniVersion"], "0.4.0");
}

#[test]
fn agent_down_add_says_try_again_and_del_is_queued() {
    let dir = tempfile::tempdir().unwrap();
    let conf = config("1.1.0", dir.path());
    assert_eq!(
        run(&[("CNI_COMMAND", "ADD"), ID, IF, NS], &conf).error_code(),
        11
    );
    assert_eq!(run(&[("CNI_COMMAND", "STATUS")], &conf).error_code(), 50);
    for _ in 0..2 {
        let out = run(
            &[("CNI_COMMAND", "DEL"), ID, IF, ("CNI_NETNS", "/gone")],
            &conf,
        );
        assert_eq!((out.code, out.stdout.as_str()), (0, ""));
    }
    let queued: Vec<_> = std::fs::read_dir(dir.path().join("cni-deletes"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    assert_eq!(queued.len(), 1, "{queued:?}");
    let entry: Value = serde_json::from_slice(&std::fs::read(&queued[0]).unwrap()).unwrap();
    assert_eq!(entry, json!({ "containerId": "c1", "ifName": "eth0" }));
}

/// Serves `replies` in order, one connection each, and returns the requests.
fn scripted(dir: &Path, replies: Vec<Option<Value>>) -> std::thread::JoinHandle<Vec<Value>> {
    let listener = UnixListener::bind(dir.join("cni.sock")).unwrap();
    std::thread::spawn(move || {
        replies
            .into_iter()
            .map(|reply| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut head = [0; 4];
                stream.read_exact(&mut head).unwrap();
                let mut body = vec![0; u32::from_be_bytes(head) as usize];
                stream.read_exact(&mut body).unwrap();
                if let Some(reply) = reply {
                    let reply = reply.to_string();
                    stream
                        .write_all(&u32::try_from(reply.len()).unwrap().to_be_bytes())
                        .unwrap();
                    stream.write_all(reply.as_bytes()).unwrap();
                }
                serde_json::from_slice(&body).unwrap()
            })
            .collect()
    })
}

fn added() -> Value {
    json!({ "ok": {
        "interfaces": [
            { "name": "weir0123456789a", "mac": "02:00:00:00:00:01", "mtu": 1500 },
            { "name": "eth0", "mac": "02:00:00:00:00:02", "mtu": 1500, "sandbox": "/proc/self/ns/net" },
        ],
        "ips": [
            { "address": "10.244.1.2/32", "gateway": "169.254.1.1", "interface": 1 },
            { "address": "fd00::2/128", "gateway": "fe80::1", "interface": 1 },
        ],
        "routes": [ { "dst": "0.0.0.0/0", "gw": "169.254.1.1" } ],
    } })
}

#[test]
fn add_answers_in_the_version_asked() {
    for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let dir = tempfile::tempdir().unwrap();
        let agent = scripted(dir.path(), vec![Some(added())]);
        let env = [
            ("CNI_COMMAND", "ADD"),
            ID,
            IF,
            NS,
            ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAME=p"),
        ];
        let out = run(&env, &config(version, dir.path()));
        assert_eq!(out.code, 0, "{}", out.stdout);
        let result = out.json();
        assert_eq!(result["cniVersion"], version);
        assert_eq!(
            result["interfaces"][0].get("mtu").is_some(),
            version == "1.1.0"
        );
        let family = result["ips"][1].get("version");
        assert_eq!(
            family,
            (version < "1.0.0").then(|| json!("6")).as_ref(),
            "{version}"
        );
        let request = &agent.join().unwrap()[0];
        assert_eq!(request["args"]["K8S_POD_NAME"], "p");
        assert_eq!(request["command"], "ADD");
    }
}

#[test]
fn what_earlier_plugins_did_is_kept_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let agent = scripted(dir.path(), vec![Some(added())]);
    let mut conf: Value = serde_json::from_slice(&config("1.0.0", dir.path())).unwrap();
    let previous = json!({
        "cniVersion": "1.0.0",
        "interfaces": [{ "name": "lo", "sandbox": "/n", "mac": "00:00:00:00:00:00" }],
        "ips": [{ "address": "127.0.0.1/8", "interface": 0 }],
        "routes": [{ "dst": "192.0.2.0/24" }],
        "dns": { "nameservers": ["192.0.2.53"] },
        "vendor": { "left": "alone" },
    });
    conf["prevResult"] = previous.clone();
    let out = run(
        &[("CNI_COMMAND", "ADD"), ID, IF, NS],
        conf.to_string().as_bytes(),
    );
    assert_eq!(out.code, 0, "{}", out.stdout);
    let result = out.json();
    for key in ["interfaces", "ips", "routes"] {
        assert_eq!(result[key][0], previous[key][0], "{key}");
    }
    assert_eq!(
        (&result["dns"], &result["vendor"]),
        (&previous["dns"], &previous["vendor"])
    );
    assert_eq!(result["interfaces"][2]["name"], "eth0");
    assert_eq!(
        (
            &result["ips"][1]["interface"],
            &result["ips"][2]["interface"]
        ),
        (&json!(2), &json!(2))
    );
    agent.join().unwrap();
}

#[test]
fn an_error_of_the_agent_is_passed_on() {
    let dir = tempfile::tempdir().unwrap();
    let error =
        json!({ "error": { "code": 103, "msg": "no free address", "details": "10.244.1.0/29" } });
    let agent = scripted(dir.path(), vec![Some(error)]);
    let out = run(
        &[("CNI_COMMAND", "ADD"), ID, IF, NS],
        &config("1.0.0", dir.path()),
    );
    assert_eq!(out.error_code(), 103);
    assert_eq!(out.json()["details"], "10.244.1.0/29");
    agent.join().unwrap();
}

#[test]
fn an_agent_that_dies_in_a_del_gets_it_again() {
    let dir = tempfile::tempdir().unwrap();
    let agent = scripted(dir.path(), vec![None, Some(json!({ "ok": {} }))]);
    let out = run(
        &[("CNI_COMMAND", "DEL"), ID, IF],
        &config("1.0.0", dir.path()),
    );
    assert_eq!(out.code, 0, "{}", out.stdout);
    assert_eq!(agent.join().unwrap().len(), 2);
    let left = std::fs::read_dir(dir.path().join("cni-deletes"))
        .unwrap()
        .count();
    assert_eq!(
        left, 0,
        "the second agent did the work: nothing stays queued"
    );
}

#[test]
fn an_agent_that_dies_in_an_add_means_try_again() {
    let dir = tempfile::tempdir().unwrap();
    let agent = scripted(dir.path(), vec![None]);
    let out = run(
        &[("CNI_COMMAND", "ADD"), ID, IF, NS],
        &config("1.0.0", dir.path()),
    );
    assert_eq!(out.error_code(), 11);
    agent.join().unwrap();
}

#[test]
fn check_sends_the_addresses_of_its_own_interface() {
    let dir = tempfile::tempdir().unwrap();
    let agent = scripted(dir.path(), vec![Some(json!({ "ok": {} }))]);
    let mut conf: Value = serde_json::from_slice(&config("1.0.0", dir.path())).unwrap();
    let mut previous = added()["ok"].clone();
    previous["ips"][1]["interface"] = json!(0);
    conf["prevResult"] = previous;
    let out = run(
        &[("CNI_COMMAND", "CHECK"), ID, IF, NS],
        conf.to_string().as_bytes(),
    );
    assert_eq!((out.code, out.stdout.as_str()), (0, ""));
    assert_eq!(
        agent.join().unwrap()[0]["addresses"],
        json!(["10.244.1.2/32"])
    );
}

#[test]
fn gc_sends_the_attachments_that_stay() {
    let dir = tempfile::tempdir().unwrap();
    let agent = scripted(dir.path(), vec![Some(json!({ "ok": {} }))]);
    let mut conf: Value = serde_json::from_slice(&config("1.1.0", dir.path())).unwrap();
    conf["cni.dev/valid-attachments"] = json!([{ "containerID": "c1", "ifname": "eth0" }]);
    let out = run(&[("CNI_COMMAND", "GC")], conf.to_string().as_bytes());
    assert_eq!(out.code, 0, "{}", out.stdout);
    let sent = &agent.join().unwrap()[0]["validAttachments"];
    assert_eq!(sent, &json!([{ "containerId": "c1", "ifName": "eth0" }]));
}
