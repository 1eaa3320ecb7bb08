//! Rule sets of iptables, ipset and nftables for what a node holds of policies, of the shape that Calico and kube-router
//! give them: a chain for each pod and direction, a chain for each policy, a set of addresses for each selector. A
//! policy's rule marks what it allows; the pod's chain asks its policies one after the other and drops what none has
//! marked. What belongs to a known connection is accepted first. nftables finds a pod's chain by a verdict map, and a
//! rule there both marks and returns. IPv4 and ports only.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use control_api::desired::{DesiredState, Name};
use control_api::v1::{Policy, PolicyPeer, PolicyRule, Protocol, policy_rule_peer};

/// Of packets that a policy allows.
const MARK: &str = "0x10000";

/// Inputs of the programs that load them.
#[derive(Debug)]
pub(super) struct Ruleset {
    /// Of `ipset restore`.
    pub(super) ipset: String,
    /// Of `iptables-restore`.
    pub(super) iptables: String,
    /// Of `nft -f`.
    pub(super) nftables: String,
}

/// Who may be the other end.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Peers {
    Everybody,
    /// Number of a selector's set.
    Set(usize),
    /// A block and its holes.
    Block(String, Vec<String>),
}

/// One rule as these programs have it.
struct Line {
    peers: Peers,
    /// Protocol, first and last port; `None` for everything.
    ports: Option<(&'static str, u32, u32)>,
}

#[derive(Clone, Copy)]
enum Direction {
    In,
    Out,
}

impl Direction {
    const BOTH: [Self; 2] = [Self::In, Self::Out];

    fn name(self) -> &'static str {
        match self {
            Self::In => "IN",
            Self::Out => "OUT",
        }
    }

    /// Which end of a packet the pod is, and which its peer; for iptables, ipset and nftables.
    fn ends(self) -> (&'static str, &'static str, &'static str, &'static str) {
        match self {
            Self::In => ("-d", "-s", "src", "saddr"),
            Self::Out => ("-s", "-d", "dst", "daddr"),
        }
    }

    fn own(self) -> &'static str {
        match self {
            Self::In => "daddr",
            Self::Out => "saddr",
        }
    }

    fn rules(self, policy: &Policy) -> (bool, &[PolicyRule]) {
        match self {
            Self::In => (policy.isolates_ingress, &policy.ingress),
            Self::Out => (policy.isolates_egress, &policy.egress),
        }
    }
}

/// Text that grows by lines.
#[derive(Default)]
struct Text(String);

impl Text {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _infallible = writeln!(self.0, "{line}");
    }
}

#[derive(Default)]
struct Writer {
    sets: BTreeMap<Vec<u8>, usize>,
    blocks: usize,
    ipset: Text,
    chains: Text,
    rules: Text,
    nft_sets: Text,
    nft_chains: Text,
    /// Elements of nftables' verdict maps, by direction.
    nft_pods: [Vec<String>; 2],
}

/// Rules for the pods of a node.
pub(super) fn of(state: &DesiredState, node: &str) -> Ruleset {
    let mut writer = Writer::default();
    let mut members: BTreeMap<&[u8], Vec<&str>> = BTreeMap::new();
    for peer in state.policy_peers.values() {
        for set in &peer.sets {
            let addresses = peer.addresses.iter().map(String::as_str);
            members
                .entry(set)
                .or_default()
                .extend(addresses.filter(|a| !a.contains(':')));
        }
    }
    for (number, (set, addresses)) in members.into_iter().enumerate() {
        writer.set(number, set, &addresses);
    }
    let local = |peer: &&PolicyPeer| peer.node == node && !peer.namespace.is_empty();
    let pods: Vec<&PolicyPeer> = state.policy_peers.values().filter(local).collect();
    let numbers: BTreeMap<&Name, usize> = state.policies.keys().zip(0..).collect();
    let mut named = BTreeMap::new();
    for port in pods.iter().flat_map(|pod| &pod.named_ports) {
        named.insert(port.name.as_str(), port.port);
    }
    for (name, policy) in state.policies.iter() {
        for direction in Direction::BOTH {
            writer.policy(numbers[name], policy, direction, &named);
        }
    }
    for (number, pod) in pods.iter().enumerate() {
        let names = pod
            .policies
            .iter()
            .map(|name| Name::new(&name.namespace, &name.name));
        let names: BTreeSet<Name> = names.collect();
        for direction in Direction::BOTH {
            let policies = names
                .iter()
                .filter(|name| {
                    let policy = state.policies.get(name);
                    policy.is_some_and(|policy| direction.rules(policy).0)
                })
                .map(|name| numbers[name]);
            let policies: Vec<usize> = policies.collect();
            if !policies.is_empty() {
                writer.pod(number, pod, direction, &policies);
            }
        }
    }
    writer.finish()
}

impl Writer {
    fn set(&mut self, number: usize, id: &[u8], addresses: &[&str]) {
        self.sets.insert(id.to_vec(), number);
        self.ipset.line(format_args!(
            "create S{number} hash:ip family inet hashsize 1024 maxelem 1048576"
        ));
        for address in addresses {
            self.ipset.line(format_args!("add S{number} {address}"));
        }
        self.nft_sets.line(format_args!(
            "set S{number} {{ type ipv4_addr\nelements = {{ {} }}\n}}",
            addresses.join(", ")
        ));
    }

    /// A set of a block with holes.
    fn block(&mut self, block: &str, holes: &[String]) -> String {
        self.blocks += 1;
        let name = format!("B{}", self.blocks);
        self.ipset.line(format_args!(
            "create {name} hash:net family inet\nadd {name} {block}"
        ));
        for hole in holes {
            self.ipset.line(format_args!("add {name} {hole} nomatch"));
        }
        name
    }

    fn lines(&self, rule: &PolicyRule, named: &BTreeMap<&str, u32>) -> Vec<Line> {
        let peers: Vec<Peers> = if rule.any_peer {
            vec![Peers::Everybody]
        } else {
            let peers = rule
                .peers
                .iter()
                .filter_map(|peer| match peer.kind.as_ref()? {
                    // A set without members matches nobody.
                    policy_rule_peer::Kind::Set(set) => {
                        self.sets.get(&set.id).copied().map(Peers::Set)
                    }
                    policy_rule_peer::Kind::IpBlock(block) => {
                        Some(Peers::Block(block.cidr.clone(), block.except.clone()))
                    }
                    policy_rule_peer::Kind::DomainName(_) => None,
                });
            peers.collect()
        };
        let ports: Vec<_> = if rule.any_port {
            vec![None]
        } else {
            let ports = rule.ports.iter().filter_map(|port| {
                let protocol = match port.protocol() {
                    Protocol::Udp => "udp",
                    Protocol::Sctp => "sctp",
                    Protocol::Tcp | Protocol::Unspecified => "tcp",
                };
                let first = if port.name.is_empty() {
                    port.first
                } else {
                    *named.get(port.name.as_str())?
                };
                Some(Some((protocol, first, port.last.max(first))))
            });
            ports.collect()
        };
        let lines = peers.iter().flat_map(|peers| {
            ports.iter().map(|ports| Line {
                peers: peers.clone(),
                ports: *ports,
            })
        });
        lines.collect()
    }

    fn policy(
        &mut self,
        number: usize,
        policy: &Policy,
        direction: Direction,
        named: &BTreeMap<&str, u32>,
    ) {
        let (isolates, rules) = direction.rules(policy);
        if !isolates {
            return;
        }
        let chain = format!("POLICY-{number}-{}", direction.name());
        self.chains.line(format_args!(":{chain} - [0:0]"));
        self.nft_chains.line(format_args!("chain {chain} {{"));
        let (_, other, set_end, nft_end) = direction.ends();
        for line in rules
            .iter()
            .flat_map(|rule| self.lines(rule, named))
            .collect::<Vec<_>>()
        {
            let (mut tables, mut nft) = (String::new(), String::new());
            match &line.peers {
                Peers::Everybody => {}
                Peers::Set(set) => {
                    tables = format!("-m set --match-set S{set} {set_end} ");
                    nft = format!("ip {nft_end} @S{set} ");
                }
                Peers::Block(block, holes) => {
                    nft = format!("ip {nft_end} {block} ");
                    if holes.is_empty() {
                        tables = format!("{other} {block} ");
                    } else {
                        let set = self.block(block, holes);
                        tables = format!("-m set --match-set {set} {set_end} ");
                        let _infallible =
                            write!(nft, "ip {nft_end} != {{ {} }} ", holes.join(", "));
                    }
                }
            }
            if let Some((protocol, first, last)) = line.ports {
                // A range of one port is none to iptables.
                let range = if first == last {
                    first.to_string()
                } else {
                    format!("{first}:{last}")
                };
                let _infallible = write!(tables, "-p {protocol} -m multiport --dports {range} ");
                let _infallible = write!(nft, "{protocol} dport {first}-{last} ");
            }
            self.rules.line(format_args!(
                "-A {chain} {tables}-j MARK --set-xmark {MARK}/{MARK}\n\
                 -A {chain} -m mark --mark {MARK}/{MARK} -j RETURN"
            ));
            self.nft_chains.line(format_args!(
                "{nft}meta mark set meta mark or {MARK} return"
            ));
        }
        self.nft_chains.line(format_args!("}}"));
    }

    fn pod(&mut self, number: usize, pod: &PolicyPeer, direction: Direction, policies: &[usize]) {
        let chain = format!("POD-{number}-{}", direction.name());
        let (own, ..) = direction.ends();
        self.chains.line(format_args!(":{chain} - [0:0]"));
        for address in pod.addresses.iter().filter(|a| !a.contains(':')) {
            self.rules
                .line(format_args!("-A POLICIES {own} {address}/32 -j {chain}"));
            self.nft_pods[direction as usize].push(format!("{address} : jump {chain}"));
        }
        self.rules.line(format_args!(
            "-A {chain} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
             -A {chain} -j MARK --set-xmark 0x0/{MARK}"
        ));
        self.nft_chains.line(format_args!(
            "chain {chain} {{\nct state established,related accept\nmeta mark set meta mark and 0xfffeffff"
        ));
        for policy in policies {
            let policy = format!("POLICY-{policy}-{}", direction.name());
            self.rules.line(format_args!(
                "-A {chain} -j {policy}\n-A {chain} -m mark --mark {MARK}/{MARK} -j RETURN"
            ));
            self.nft_chains.line(format_args!(
                "jump {policy}\nmeta mark and {MARK} == {MARK} return"
            ));
        }
        self.rules.line(format_args!("-A {chain} -j DROP"));
        self.nft_chains.line(format_args!("drop\n}}"));
    }

    fn finish(self) -> Ruleset {
        let iptables = format!(
            "*filter\n:POLICIES - [0:0]\n{}-A FORWARD -j POLICIES\n{}COMMIT\n",
            self.chains.0, self.rules.0
        );
        let mut maps = String::new();
        let mut asks = String::new();
        for direction in [Direction::Out, Direction::In] {
            let pods = self.nft_pods[direction as usize].join(",\n");
            let name = direction.name();
            if !pods.is_empty() {
                let _infallible = writeln!(
                    maps,
                    "map pods-{name} {{ type ipv4_addr : verdict\nelements = {{ {pods} }}\n}}"
                );
                let _infallible = writeln!(asks, "ip {} vmap @pods-{name}", direction.own());
            }
        }
        let nftables = format!(
            "table ip policies {{\n{}{}{maps}\
             chain forward {{\ntype filter hook forward priority filter;\n{asks}}}\n}}\n",
            self.nft_sets.0, self.nft_chains.0
        );
        Ruleset {
            ipset: self.ipset.0,
            iptables,
            nftables,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::large::{self, Size};
    use super::super::traffic;
    use super::*;

    #[test]
    fn every_rule_has_a_set_of_its_peers_and_the_one_that_traffic_needs_stands_in_the_middle() {
        let addresses = [[10, 244, 1, 2], [10, 244, 1, 3], [10, 244, 2, 2]];
        let cluster = traffic::cluster(100, addresses.map(Into::into));
        let rules = of(&cluster.state("n1"), "n1");
        let count = |text: &str, part: &str| text.matches(part).count();
        assert_eq!(count(&rules.iptables, "--match-set"), 200);
        assert_eq!(count(&rules.iptables, "-A POD-0-OUT -j POLICY"), 10);
        assert_eq!(count(&rules.iptables, "-A POD-1-IN -j POLICY"), 10);
        assert!(
            rules
                .iptables
                .contains("-A POLICIES -s 10.244.1.2/32 -j POD-0-OUT\n")
        );
        // Clients, servers, and 99 groups: the middle one is not asked for.
        assert_eq!(count(&rules.ipset, "create S"), 101);
        assert_eq!(count(&rules.ipset, "add S"), 99 * 10 + 3);
        assert_eq!(count(&rules.nftables, " return\n"), 200 + 20);
        assert!(rules.nftables.contains("10.244.1.3 : jump POD-1-IN"));
        let line = rules
            .iptables
            .lines()
            .find(|line| line.starts_with("-A POLICY-15-IN") && line.contains("--match-set"));
        assert_eq!(
            line.map(|line| line.contains("--dports 8080:8089")),
            Some(true)
        );
    }

    #[test]
    fn blocks_with_holes_are_sets_and_names_of_ports_are_numbers() {
        let (pods, policies) = (large::pods(Size::QUICK), large::policies(Size::QUICK));
        let cluster = large::build(Size::QUICK, &pods, &policies);
        let rules = of(&cluster.state("n1"), "n1");
        assert!(rules.ipset.contains("create B1 hash:net"));
        assert!(rules.ipset.contains("/24 nomatch"));
        assert!(rules.nftables.contains("ip daddr != { 172."));
        assert!(rules.iptables.contains("--dports 8080 -j MARK"));
        assert!(!rules.iptables.contains("http"));
    }
}
