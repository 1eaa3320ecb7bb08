//! What pods see of their node. [pure]

use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Facts of this node that go into pods' configuration.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeFacts {
    pub(crate) name: String,
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) cpu_millis: i64,
    pub(crate) memory_bytes: i64,
    pub(crate) cgroup_parent: String,
    pub(crate) log_dir: PathBuf,
    /// One folder per pod UID: volumes, hosts files, termination logs, the last status.
    pub(crate) pods_dir: PathBuf,
    pub(crate) resolv: ResolvConf,
    pub(crate) prefer_present_images: bool,
}

impl NodeFacts {
    pub(crate) fn pod_dir(&self, uid: &str) -> PathBuf {
        self.pods_dir.join(uid)
    }

    pub(crate) fn pod_log_dir(&self, namespace: &str, name: &str, uid: &str) -> PathBuf {
        self.log_dir.join(format!("{namespace}_{name}_{uid}"))
    }

    pub(crate) fn pod_cgroup(&self, uid: &str) -> String {
        format!("{}/pod{uid}", self.cgroup_parent.trim_end_matches('/'))
    }
}

/// True for a name that is safe as one component of a path.
pub(crate) fn is_component(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0'])
}

/// `base` joined with a relative path from a pod's spec; `None` when it would leave `base`.
pub(crate) fn join_inside(base: &Path, relative: &str) -> Option<PathBuf> {
    let mut path = base.to_path_buf();
    for part in relative.split('/').filter(|p| !p.is_empty() && *p != ".") {
        if !is_component(part) {
            return None;
        }
        path.push(part);
    }
    Some(path)
}

/// The node's own resolver configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResolvConf {
    pub(crate) servers: Vec<String>,
    pub(crate) searches: Vec<String>,
    pub(crate) options: Vec<String>,
}

impl ResolvConf {
    /// Reads the text of a resolv.conf; unknown lines are skipped, the last `search` counts.
    pub(crate) fn parse(text: &str) -> Self {
        let mut conf = Self::default();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => conf.servers.extend(words.next().map(str::to_owned)),
                Some("search" | "domain") => {
                    conf.searches = words.map(|w| w.trim_end_matches('.').to_owned()).collect();
                    conf.searches.retain(|s| !s.is_empty());
                }
                Some("options") => conf.options.extend(words.map(str::to_owned)),
                _ => {}
            }
        }
        conf
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_resolv_conf() {
        let text = "# comment\nsearch a.\nnameserver 1.1.1.1\nsearch corp.example. lab\noptions ndots:2 edns0\nnameserver ::1\nnameserver\n";
        let conf = ResolvConf::parse(text);
        assert_eq!(conf.servers, ["1.1.1.1", "::1"]);
        assert_eq!(conf.searches, ["corp.example", "lab"]);
        assert_eq!(conf.options, ["ndots:2", "edns0"]);
    }

    #[test]
    fn relative_paths_stay_inside() {
        let base = Path::new("/base");
        assert_eq!(join_inside(base, "a//b/./c"), Some("/base/a/b/c".into()));
        assert_eq!(join_inside(base, ""), Some("/base".into()));
        assert_eq!(join_inside(base, "../x"), None);
        assert_eq!(join_inside(base, "a/../../x"), None);
    }
}
