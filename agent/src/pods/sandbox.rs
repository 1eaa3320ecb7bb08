//! A pod's sandbox as the runtime should make it. [pure]

use control_api::v1::{ClusterConfig, PodSpec, Protocol};

use super::cri::v1;
use super::node::{NodeFacts, ResolvConf};
use super::view::label;

/// Limits of resolvers that Kubernetes applies to pods.
const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
const MAX_SEARCH_CHARACTERS: usize = 2048;
const MAX_HOSTNAME: usize = 63;

pub(crate) fn sandbox_config(
    spec: &PodSpec,
    cluster: &ClusterConfig,
    node: &NodeFacts,
    attempt: u32,
) -> v1::PodSandboxConfig {
    let security = spec.security.clone().unwrap_or_default();
    let mut labels = spec.labels.clone();
    labels.extend(pod_labels(spec));
    let mut annotations = spec.annotations.clone();
    annotations.insert(
        label::GRACE_PERIOD.into(),
        spec.termination_grace_period_s.to_string(),
    );
    let privileged = spec
        .containers
        .iter()
        .chain(&spec.init_containers)
        .any(|c| c.security.as_ref().is_some_and(|s| s.privileged));
    v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: spec.name.clone(),
            uid: spec.uid.clone(),
            namespace: spec.namespace.clone(),
            attempt,
        }),
        // The node's own name is not the pod's to set.
        hostname: if spec.host_network {
            String::new()
        } else {
            hostname(spec, node)
        },
        log_directory: node
            .pod_log_dir(&spec.namespace, &spec.name, &spec.uid)
            .to_string_lossy()
            .into_owned(),
        dns_config: Some(dns_config(spec, cluster, &node.resolv)),
        port_mappings: port_mappings(spec),
        labels,
        annotations,
        linux: Some(v1::LinuxPodSandboxConfig {
            cgroup_parent: node.pod_cgroup(&spec.uid),
            sysctls: security.sysctls.clone(),
            security_context: Some(v1::LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces(spec)),
                run_as_user: security.run_as_user.map(|value| v1::Int64Value { value }),
                // The runtime refuses a group without a user.
                run_as_group: security
                    .run_as_group
                    .filter(|_| security.run_as_user.is_some())
                    .map(|value| v1::Int64Value { value }),
                supplemental_groups: groups(spec),
                privileged,
            }),
        }),
    }
}

/// Labels that find a pod's objects in the runtime.
pub(crate) fn pod_labels(spec: &PodSpec) -> [(String, String); 3] {
    [
        (label::POD_NAME.into(), spec.name.clone()),
        (label::POD_NAMESPACE.into(), spec.namespace.clone()),
        (label::POD_UID.into(), spec.uid.clone()),
    ]
}

pub(crate) fn namespaces(spec: &PodSpec) -> v1::NamespaceOption {
    use v1::NamespaceMode::{Container, Node, Pod};
    let pid = if spec.host_pid {
        Node
    } else if spec.share_process_namespace {
        Pod
    } else {
        Container
    };
    v1::NamespaceOption {
        network: if spec.host_network { Node } else { Pod }.into(),
        pid: pid.into(),
        ipc: if spec.host_ipc { Node } else { Pod }.into(),
        target_id: String::new(),
    }
}

/// Groups that every process of the pod has besides its own.
pub(crate) fn groups(spec: &PodSpec) -> Vec<i64> {
    let Some(security) = &spec.security else {
        return Vec::new();
    };
    let mut groups = security.supplemental_groups.clone();
    groups.extend(security.fs_group);
    groups
}

/// The pod's host name; the node's own for pods in the node's network.
pub(crate) fn hostname(spec: &PodSpec, node: &NodeFacts) -> String {
    if spec.host_network {
        return node.name.clone();
    }
    let name = if spec.hostname.is_empty() {
        &spec.name
    } else {
        &spec.hostname
    };
    let cut: String = name.chars().take(MAX_HOSTNAME).collect();
    cut.trim_end_matches(['-', '.']).to_owned()
}

fn port_mappings(spec: &PodSpec) -> Vec<v1::PortMapping> {
    if spec.host_network {
        return Vec::new();
    }
    let ports = spec
        .containers
        .iter()
        .chain(&spec.init_containers)
        .flat_map(|c| &c.ports);
    ports
        .filter(|p| p.host_port > 0)
        .map(|p| v1::PortMapping {
            protocol: match p.protocol() {
                Protocol::Udp => v1::Protocol::Udp,
                Protocol::Sctp => v1::Protocol::Sctp,
                Protocol::Tcp | Protocol::Unspecified => v1::Protocol::Tcp,
            }
            .into(),
            container_port: i32::try_from(p.container_port).unwrap_or(0),
            host_port: i32::try_from(p.host_port).unwrap_or(0),
            host_ip: p.host_ip.clone(),
        })
        .collect()
}

/// Resolver settings by the pod's DNS policy, then its own additions.
pub(crate) fn dns_config(
    spec: &PodSpec,
    cluster: &ClusterConfig,
    node: &ResolvConf,
) -> v1::DnsConfig {
    let cluster_first = match spec.dns_policy.as_str() {
        "Default" | "None" => false,
        "ClusterFirstWithHostNet" => true,
        _ => !spec.host_network,
    } && !cluster.dns_ips.is_empty();
    let mut dns = if spec.dns_policy == "None" {
        v1::DnsConfig::default()
    } else if cluster_first {
        let domain = cluster.cluster_domain.trim_end_matches('.');
        let mut searches = vec![
            format!("{}.svc.{domain}", spec.namespace),
            format!("svc.{domain}"),
            domain.to_owned(),
        ];
        push_new(&mut searches, &node.searches);
        v1::DnsConfig {
            servers: cluster.dns_ips.clone(),
            searches,
            options: vec!["ndots:5".into()],
        }
    } else {
        v1::DnsConfig {
            servers: node.servers.clone(),
            searches: node.searches.clone(),
            options: node.options.clone(),
        }
    };
    if let Some(own) = &spec.dns_config {
        push_new(&mut dns.servers, &own.nameservers);
        push_new(&mut dns.searches, &own.searches);
        for option in &own.options {
            let is_same = |o: &String| o.split(':').next() == Some(option.name.as_str());
            dns.options.retain(|o| !is_same(o));
            dns.options.push(if option.value.is_empty() {
                option.name.clone()
            } else {
                format!("{}:{}", option.name, option.value)
            });
        }
    }
    dns.servers.truncate(MAX_NAMESERVERS);
    dns.searches.truncate(MAX_SEARCHES);
    while dns.searches.iter().map(|s| s.len() + 1).sum::<usize>() > MAX_SEARCH_CHARACTERS {
        dns.searches.pop();
    }
    dns
}

fn push_new(list: &mut Vec<String>, more: &[String]) {
    for item in more {
        if !list.contains(item) {
            list.push(item.clone());
        }
    }
}

/// Text of the pod's /etc/hosts.
pub(crate) fn hosts_file(
    spec: &PodSpec,
    cluster: &ClusterConfig,
    node: &NodeFacts,
    pod_ips: &[String],
    node_hosts: &str,
) -> String {
    let mut text = String::from("# Managed by Weir: edits are lost.\n");
    if spec.host_network {
        text.push_str(node_hosts);
        if !node_hosts.ends_with('\n') {
            text.push('\n');
        }
    } else {
        text.push_str(
            "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
             fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\n\
             fe00::2\tip6-allrouters\n",
        );
        let short = hostname(spec, node);
        for ip in pod_ips {
            if spec.subdomain.is_empty() {
                text.push_str(&format!("{ip}\t{short}\n"));
            } else {
                let domain = cluster.cluster_domain.trim_end_matches('.');
                let (subdomain, namespace) = (&spec.subdomain, &spec.namespace);
                text.push_str(&format!(
                    "{ip}\t{short}.{subdomain}.{namespace}.svc.{domain}\t{short}\n"
                ));
            }
        }
    }
    if !spec.host_aliases.is_empty() {
        text.push_str("\n# Host aliases of the pod.\n");
        for alias in &spec.host_aliases {
            text.push_str(&format!("{}\t{}\n", alias.ip, alias.hostnames.join("\t")));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use control_api::v1::{DnsConfig, DnsOption, HostAlias};

    fn cluster() -> ClusterConfig {
        ClusterConfig {
            cluster_domain: "cluster.local".into(),
            dns_ips: vec!["10.96.0.10".into(), "fd00:10:96::a".into()],
            ..ClusterConfig::default()
        }
    }

    fn pod(policy: &str) -> PodSpec {
        PodSpec {
            namespace: "shop".into(),
            name: "web-0".into(),
            dns_policy: policy.into(),
            ..PodSpec::default()
        }
    }

    #[test]
    fn dns_follows_the_policy() {
        let node = ResolvConf::parse("nameserver 9.9.9.9\nsearch corp\noptions edns0");
        let dns = dns_config(&pod("ClusterFirst"), &cluster(), &node);
        assert_eq!(dns.servers, ["10.96.0.10", "fd00:10:96::a"]);
        assert_eq!(
            dns.searches,
            [
                "shop.svc.cluster.local",
                "svc.cluster.local",
                "cluster.local",
                "corp"
            ]
        );
        assert_eq!(dns.options, ["ndots:5"]);

        let host = PodSpec {
            host_network: true,
            ..pod("ClusterFirst")
        };
        assert_eq!(dns_config(&host, &cluster(), &node).servers, ["9.9.9.9"]);
        let with = PodSpec {
            host_network: true,
            ..pod("ClusterFirstWithHostNet")
        };
        assert_eq!(
            dns_config(&with, &cluster(), &node).servers[0],
            "10.96.0.10"
        );
        assert_eq!(
            dns_config(&pod("Default"), &cluster(), &node).options,
            ["edns0"]
        );

        let own = DnsConfig {
            nameservers: vec!["1.2.3.4".into()],
            searches: vec!["x".into()],
            options: vec![DnsOption {
                name: "ndots".into(),
                value: "2".into(),
            }],
        };
        let none = PodSpec {
            dns_config: Some(own.clone()),
            ..pod("None")
        };
        let dns = dns_config(&none, &cluster(), &node);
        assert_eq!((dns.servers.len(), dns.searches.len()), (1, 1));
        let merged = PodSpec {
            dns_config: Some(own),
            ..pod("ClusterFirst")
        };
        let dns = dns_config(&merged, &cluster(), &node);
        assert_eq!(dns.servers.len(), 3);
        assert_eq!(dns.options, ["ndots:2"]);
    }

    #[test]
    fn hosts_file_names_the_pod_and_its_aliases() {
        let mut spec = PodSpec {
            subdomain: "web".into(),
            ..pod("ClusterFirst")
        };
        spec.host_aliases = vec![HostAlias {
            ip: "10.1.1.1".into(),
            hostnames: vec!["a".into(), "b".into()],
        }];
        let text = hosts_file(
            &spec,
            &cluster(),
            &NodeFacts::default(),
            &["10.244.1.2".into()],
            "",
        );
        assert!(
            text.contains("10.244.1.2\tweb-0.web.shop.svc.cluster.local\tweb-0\n"),
            "{text}"
        );
        assert!(text.contains("10.1.1.1\ta\tb\n"), "{text}");
    }

    #[test]
    fn a_pod_in_the_nodes_network_sets_no_name_and_maps_no_port() {
        use control_api::v1::{Container, ContainerPort};
        let ports = vec![ContainerPort {
            container_port: 80,
            host_port: 8080,
            ..Default::default()
        }];
        let containers = vec![Container {
            ports,
            ..Container::default()
        }];
        let own = PodSpec {
            containers,
            ..pod("")
        };
        let host = PodSpec {
            host_network: true,
            ..own.clone()
        };
        let node = NodeFacts {
            name: "n1".into(),
            ..NodeFacts::default()
        };
        let own = sandbox_config(&own, &cluster(), &node, 0);
        assert_eq!(
            (own.hostname.as_str(), own.port_mappings.len()),
            ("web-0", 1)
        );
        let host = sandbox_config(&host, &cluster(), &node, 0);
        assert_eq!((host.hostname.as_str(), host.port_mappings.len()), ("", 0));
        let namespaces = host
            .linux
            .and_then(|l| l.security_context?.namespace_options);
        assert_eq!(
            namespaces.map(|n| n.network()),
            Some(v1::NamespaceMode::Node)
        );
    }

    #[test]
    fn host_names_are_cut_to_a_label() {
        let spec = PodSpec {
            name: format!("{}-tail", "a".repeat(62)),
            ..pod("")
        };
        assert_eq!(hostname(&spec, &NodeFacts::default()), "a".repeat(62));
    }
}
