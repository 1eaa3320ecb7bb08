use std::collections::BTreeMap;
use std::time::Duration;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::Name;
use proptest::prelude::*;

use super::{Corefile, Field, LogClass, Match, Mounted, Policy, Sources, Target, matches, read};
use crate::dns::PodRecords;

/// What kubeadm writes.
const KUBEADM: &str = "\
.:53 {
    errors
    health {
       lameduck 5s
    }
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
       pods insecure
       fallthrough in-addr.arpa ip6.arpa
       ttl 30
    }
    prometheus :9153
    forward . /etc/resolv.conf {
       max_concurrent 1000
    }
    cache 30 {
       disable success cluster.local
       disable denial cluster.local
    }
    loop
    reload
    loadbalance
}
";

/// What k3s writes.
const K3S: &str = "\
.:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
      pods insecure
      fallthrough in-addr.arpa ip6.arpa
    }
    hosts /etc/coredns/NodeHosts {
      ttl 60
      reload 15s
      fallthrough
    }
    prometheus :9153
    cache 30
    loop
    reload
    loadbalance
    import /etc/coredns/custom/*.override
    forward . /etc/resolv.conf
}
import /etc/coredns/custom/*.server
";

fn mounted(files: &[(&str, &str)]) -> Mounted {
    let own = |(path, text): &(&str, &str)| ((*path).to_owned(), (*text).to_owned());
    Mounted(files.iter().map(own).collect())
}

fn parse(text: &str) -> Result<Corefile, String> {
    parse_with(text, &Mounted::default())
}

fn parse_with(text: &str, sources: &dyn Sources) -> Result<Corefile, String> {
    Corefile::parse(text, "/etc/coredns/Corefile", sources).map_err(|error| error.to_string())
}

fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

#[test]
fn kubeadms_corefile() {
    let corefile = parse(KUBEADM).unwrap();
    let [block] = corefile.blocks.as_slice() else {
        panic!("{corefile:?}")
    };
    assert!(block.errors && block.finds_loops && block.loadbalance);
    assert_eq!(block.keys[0].zone, Name::root());
    let health = block.health.as_ref().unwrap();
    assert_eq!(
        (health.address.port(), health.lameduck.as_secs()),
        (8080, 5)
    );
    assert_eq!(block.ready.unwrap().port(), 8181);
    assert_eq!(block.prometheus.unwrap().to_string(), "[::]:9153");
    let kubernetes = block.kubernetes.as_ref().unwrap();
    assert_eq!(kubernetes.pods, PodRecords::Insecure);
    assert_eq!(kubernetes.ttl_s, 30);
    assert_eq!(
        kubernetes.fallthrough,
        [name("in-addr.arpa."), name("ip6.arpa.")]
    );
    let forward = &block.forwards[0];
    assert_eq!(forward.to, [Target::ResolvConf("/etc/resolv.conf".into())]);
    assert_eq!((forward.max_concurrent, forward.max_fails), (1000, 2));
    let cache = block.cache.as_ref().unwrap();
    assert_eq!(cache.success.most, Duration::from_secs(30));
    assert_eq!(cache.without_denial, [name("cluster.local.")]);
    assert_eq!(block.reload.unwrap().interval, Duration::from_secs(30));
}

#[test]
fn k3s_corefile_with_what_users_add() {
    let sources = mounted(&[
        ("/etc/coredns/custom/a.override", "log\n"),
        (
            "/etc/coredns/custom/b.override",
            "rewrite name exact a.example b.example",
        ),
        (
            "/etc/coredns/custom/corp.server",
            "corp.example:53 {\n    forward . 192.0.2.7\n}\n",
        ),
        ("/etc/coredns/custom/notes", "nothing { of interest"),
    ]);
    let corefile = parse_with(K3S, &sources).unwrap();
    let [main, corp] = corefile.blocks.as_slice() else {
        panic!("{corefile:?}")
    };
    assert_eq!((main.log.len(), main.rewrites.len()), (1, 1));
    let hosts = main.hosts.as_ref().unwrap();
    assert_eq!(hosts.file.as_deref(), Some("/etc/coredns/NodeHosts"));
    assert_eq!((hosts.ttl_s, hosts.fallthrough.len()), (60, 1));
    assert_eq!(corp.keys[0].zone, name("corp.example."));
    let broken = mounted(&[(
        "/etc/coredns/custom/x.server",
        "a.example {\n\n  nothing\n}",
    )]);
    let error = parse_with(K3S, &broken).unwrap_err();
    assert!(
        error.starts_with("/etc/coredns/custom/x.server:3: the directive nothing is not known"),
        "{error}"
    );
}

#[test]
fn snippets_quotes_comments_and_blocks_without_braces() {
    let text = "# nothing\n(upstreams) {\n  forward . 192.0.2.1 192.0.2.2 {\n    policy sequential\n  }\n}\n\
                a.example b.example,\n\tc.example { # three\n  import upstreams\n  log . \"{remote} \\\"{name}\\\"\" {\n    class denial error\n  }\n}\n";
    let corefile = parse(text).unwrap();
    assert_eq!(corefile.blocks.len(), 1, "{corefile:?}");
    let error = parse("a.example\nb.example {\n errors\n}\n").unwrap_err();
    assert!(error.contains(":2: the directive b.example"), "{error}");
    let block = &corefile.blocks[0];
    assert_eq!(block.keys.len(), 3);
    assert_eq!(block.forwards[0].policy, Policy::Sequential);
    assert_eq!(block.log[0].format, "{remote} \"{name}\"");
    assert_eq!(block.log[0].classes, [LogClass::Denial, LogClass::Error]);
    let bare = parse("example.org\nerrors\nforward . 192.0.2.1\n").unwrap();
    assert_eq!(bare.blocks[0].forwards.len(), 1);
    assert!(parse("# nothing").unwrap_err().contains("no server block"));
}

struct Environment;

impl Sources for Environment {
    fn read(&self, path: &str) -> Result<String, String> {
        Err(format!("no {path}"))
    }

    fn matching(&self, _: &str) -> Vec<String> {
        Vec::new()
    }

    fn variable(&self, name: &str) -> Result<String, String> {
        Ok(BTreeMap::from([("UP", "192.0.2.9"), ("SELF", "{$SELF}")])
            .get(name)
            .copied()
            .unwrap_or_default()
            .to_owned())
    }
}

#[test]
fn environment_variables() {
    let corefile = parse_with(". {\n forward . {$UP}:5353 {%UP%}\n}", &Environment).unwrap();
    let shown = format!("{:?}", corefile.blocks[0].forwards[0].to);
    assert!(
        shown.contains("192.0.2.9:5353") && shown.contains("192.0.2.9:53"),
        "{shown}"
    );
    let error = parse_with("{$SELF} {\n}", &Environment).unwrap_err();
    assert!(error.contains("{$SELF} is no zone"), "{error}");
    let error = parse(". {\n forward . {$UP}\n}").unwrap_err();
    assert!(error.contains(":2:") && error.contains("UP"), "{error}");
}

#[test]
fn forwards() {
    let text = ". {\n forward example.org 192.0.2.1:5353 [2001:db8::1]:53 2001:db8::2 tls://192.0.2.3%dns.example tls://192.0.2.4%dns.example:10853 {\n\
                except a.example.org\n force_tcp\n prefer_udp\n expire 20s\n max_fails 3\n tls /ca.pem\n tls_servername x.example\n policy round_robin\n\
                health_check 5s no_rec domain example.org\n max_concurrent 9\n next NXDOMAIN\n failover SERVFAIL REFUSED\n failfast_all_unhealthy_upstreams\n}\n}";
    let forward = parse(text).unwrap().blocks.remove(0).forwards.remove(0);
    let shown: Vec<String> = forward
        .to
        .iter()
        .map(|to| match to {
            Target::Server {
                address,
                tls,
                server_name,
            } => format!("{address} {tls} {}", server_name.as_deref().unwrap_or("-")),
            Target::ResolvConf(_) => "file".into(),
        })
        .collect();
    assert_eq!(
        shown,
        [
            "192.0.2.1:5353 false -",
            "[2001:db8::1]:53 false -",
            "[2001:db8::2]:53 false -",
            "192.0.2.3:853 true dns.example",
            "192.0.2.4:10853 true dns.example",
        ]
    );
    assert_eq!(forward.tls.authority.as_deref(), Some("/ca.pem"));
    assert_eq!(forward.health_check_domain, name("example.org."));
    assert!(!forward.health_check_recursion && forward.fail_fast);
    assert_eq!(
        forward.failover,
        [ResponseCode::ServFail, ResponseCode::Refused]
    );
}

#[test]
fn rewrites() {
    let text = ". {\n rewrite name a.example b.example\n rewrite continue name suffix .a. .b.\n\
                rewrite stop {\n  name regex (.*)-x\\.example\\.org {1}.svc.example\n  answer name (.*)\\.svc\\.example {1}-x.example.org\n }\n\
                rewrite ttl regex .* 30-60\n rewrite type ANY HINFO\n}";
    let rules = parse(text).unwrap().blocks.remove(0).rewrites;
    assert_eq!(rules.len(), 5);
    assert!(rules[1].goes_on && !rules[2].goes_on);
    assert!(matches!(&rules[2].field, Field::Name(rule)
        if rule.answer.len() == 1 && matches!(rule.matching, Match::Regex(_))));
    assert!(
        matches!(rules[3].field, Field::Ttl(_, range) if (range.least, range.most) == (30, 60))
    );
}

#[test]
fn what_is_wrong_is_named_with_file_and_line() {
    for (text, wanted) in [
        (
            ". {\n  errors\n  template IN A {\n }\n}",
            ":3: the directive template is not known here",
        ),
        (
            ". {\n  cache {\n    success x\n  }\n}",
            ":3: success: \"x\" is no fitting number",
        ),
        (
            ". {\n  cache {\n    colour blue\n  }\n}",
            ":3: cache has no option colour here; it has success",
        ),
        (
            ". {\n  forward . dns.example\n}",
            ":2: dns.example is no address",
        ),
        (
            ". {\n  forward . https://192.0.2.1\n}",
            ":2: https://192.0.2.1: forwarding over https",
        ),
        (
            ". {\n  kubernetes cluster.local {\n    pods verified\n  }\n}",
            ":3: pods verified is not done here",
        ),
        (
            ". {\n  kubernetes a.example b.example\n}",
            ":2: kubernetes serves one zone",
        ),
        (". {\n  errors\n  errors\n}", ":3: errors is there twice"),
        (
            ". {\n errors\n}\n\n. {\n}",
            ":5: . on port 53 is served by another block",
        ),
        (
            ". {\n  log \"{x}\n",
            ":2: the quotes that begin here do not end",
        ),
        (
            ". {\n  health {\n",
            ":2: the braces that begin here are not closed",
        ),
        (".\n}\n", ":2: this } closes nothing"),
        ("tls://. {\n}", ":1: tls://.: serving tls is not done here"),
        (
            "(a) {\n import a\n}\n. {\n import a\n}",
            "does a import itself?",
        ),
        (
            ". {\n import /nowhere\n}",
            ":2: import /nowhere: there is no /nowhere",
        ),
        (". {\n rewrite name regex ( x\n}", ":2: \"(\" is no pattern"),
        (
            ". {\n rewrite edns0 local set 1 2\n}",
            ":2: rewriting edns0 is not done here",
        ),
    ] {
        let error = parse(text).unwrap_err();
        assert!(
            error.starts_with("/etc/coredns/Corefile:") && error.contains(wanted),
            "{text}\n{error}\n{wanted}"
        );
    }
}

#[test]
fn patterns_of_files() {
    for (pattern, path, wanted) in [
        ("/a/*.server", "/a/x.server", true),
        ("/a/*.server", "/a/b/x.server", false),
        ("/a/*", "/a/x", true),
        ("/a/?x*y", "/a/1x22y", true),
        ("/a/?x*y", "/a/x22y", false),
    ] {
        assert_eq!(matches(pattern, path), wanted, "{pattern} {path}");
    }
}

/// Pieces that Corefiles are made of, so that random texts come far.
fn piece() -> impl Strategy<Value = String> {
    let fixed = [
        "{",
        "}",
        "\n",
        " ",
        "\t",
        "\"",
        "\\",
        "#",
        ",",
        ".",
        "(",
        ")",
        "(s)",
        "import",
        "import s",
        "forward",
        "forward . 192.0.2.1",
        "cache",
        "cache 30",
        "success",
        "hosts",
        "rewrite name",
        "regex",
        "answer auto",
        "kubernetes",
        "example.org",
        "{$A}",
        "{%A%}",
        "{1}",
        "10.0.0.0/8",
        "::/0",
        ":53",
        "tls://",
        "log",
        "health",
        "lameduck",
        "5s",
        "%",
        "é",
        "\u{feff}",
        "\r\n",
    ];
    prop_oneof![
        8 => prop::sample::select(fixed.to_vec()).prop_map(str::to_owned),
        1 => "\\PC{0,8}",
    ]
}

fn texts() -> impl Strategy<Value = String> {
    prop::collection::vec(piece(), 0..60).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever the text is, it is taken or refused with a line that it has.
    #[test]
    fn no_text_panics(text in texts()) {
        if let Err(error) = Corefile::parse(&text, "F", &Environment) {
            prop_assert!(error.place.line as usize <= text.lines().count().max(1));
        }
    }

    /// What is read and written is read as the same.
    #[test]
    fn reading_what_was_written_changes_nothing(text in texts()) {
        let sources = Mounted::default();
        if let Ok(blocks) = read(&text, "F", &sources) {
            let written: String = blocks.iter().map(ToString::to_string).collect();
            prop_assert_eq!(read(&written, "F", &sources).unwrap(), blocks, "{}", written);
        }
    }
}
