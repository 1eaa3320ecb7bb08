//! Rule sets of the shape that kube-proxy gives to iptables and nftables for the same services.
//!
//! iptables: one chain `KUBE-SERVICES` with a rule per service port, a chain per service with a rule per endpoint that
//! is taken with falling odds, and a chain per endpoint with the translation. Rules of endpoints go without comments, as
//! those of kube-proxy do with more than a thousand endpoints; the others have theirs. nftables: one verdict map over
//! address, protocol and port, a chain per service with a verdict map over a random number, a chain per endpoint. Both
//! mark what has to be masqueraded with 0x4000 and masquerade what is marked, and both have the checks in front of
//! forwarding.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddrV4};

use crate::fleet::{CLUSTER_CIDR, Fleet, SERVICE_PORT, Service};

/// Input of `iptables-restore --noflush` after the endpoints of one service changed.
pub(crate) fn iptables_change(fleet: &Fleet, index: usize) -> String {
    let mut text = String::from("*nat\n");
    for port in ports_of(index, &fleet.services[index]) {
        let mut all = [const { String::new() }; 4];
        let [chains, services, node_ports, rest] = &mut all;
        iptables_port(&port, chains, services, node_ports, rest);
        text.push_str(chains);
        text.push_str(rest);
    }
    text.push_str("COMMIT\n");
    text
}

/// Input of `nft -f` after the endpoints of one service changed.
pub(crate) fn nftables_change(fleet: &Fleet, index: usize) -> String {
    let mut chains = String::new();
    let mut flushes = String::new();
    for port in ports_of(index, &fleet.services[index]) {
        nftables_service(&port, &mut chains);
        let _infallible = writeln!(flushes, "flush chain ip kube-proxy service-{}", port.label);
        for (index, backend) in port.service.backends.iter().enumerate() {
            let endpoint = port.endpoint_chain(index, backend);
            let _infallible = writeln!(
                flushes,
                "add chain ip kube-proxy {endpoint}\nflush chain ip kube-proxy {endpoint}"
            );
        }
    }
    format!("{flushes}table ip kube-proxy {{\n{chains}}}\n")
}

/// A service port, as both generators walk it.
struct Port<'a> {
    service: &'a Service,
    protocol: &'static str,
    /// Part of chain names.
    label: String,
}

fn ports(fleet: &Fleet) -> impl Iterator<Item = Port<'_>> {
    fleet
        .services
        .iter()
        .enumerate()
        .flat_map(|(index, service)| ports_of(index, service))
}

fn ports_of(index: usize, service: &Service) -> impl Iterator<Item = Port<'_>> {
    service.protocols().iter().map(move |(protocol, _)| Port {
        service,
        protocol,
        label: format!("{index:05}{}", protocol[..1].to_uppercase()),
    })
}

impl Port<'_> {
    /// The nftables chain of one endpoint.
    fn endpoint_chain(&self, index: usize, backend: &SocketAddrV4) -> String {
        format!("endpoint-{}-{index:02}-{}", self.label, backend.port())
    }
}

/// Input of `iptables-restore`.
pub(crate) fn iptables(fleet: &Fleet) -> String {
    let mut chains = String::new();
    let mut services = String::new();
    let mut node_ports = String::new();
    let mut rest = String::new();
    for port in ports(fleet) {
        iptables_port(
            &port,
            &mut chains,
            &mut services,
            &mut node_ports,
            &mut rest,
        );
    }
    format!(
        "*filter\n\
         :KUBE-FIREWALL - [0:0]\n:KUBE-FORWARD - [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-EXTERNAL-SERVICES - [0:0]\n\
         -A INPUT -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES\n-A INPUT -j KUBE-FIREWALL\n\
         -A FORWARD -j KUBE-FORWARD\n-A FORWARD -m conntrack --ctstate NEW -j KUBE-SERVICES\n\
         -A FORWARD -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES\n\
         -A OUTPUT -m conntrack --ctstate NEW -j KUBE-SERVICES\n-A OUTPUT -j KUBE-FIREWALL\n\
         -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\n\
         -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT\n\
         -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\nCOMMIT\n\
         *nat\n\
         :KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n:KUBE-POSTROUTING - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n\
         {chains}\
         -A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n-A POSTROUTING -j KUBE-POSTROUTING\n\
         -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n\
         -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
         -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000\n-A KUBE-POSTROUTING -j MASQUERADE --random-fully\n\
         {services}\
         -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n\
         {node_ports}{rest}COMMIT\n"
    )
}

fn iptables_port(
    port: &Port<'_>,
    chains: &mut String,
    services: &mut String,
    node_ports: &mut String,
    rest: &mut String,
) {
    let Port {
        service,
        protocol,
        label,
    } = port;
    let (address, backends) = (service.address, &service.backends);
    let name = format!("bench/{}:{protocol}", service.name);
    let to_service = format!(
        "-d {address}/32 -p {protocol} -m comment --comment \"{name} cluster IP\" -m {protocol} --dport {SERVICE_PORT}"
    );
    // Writing to a string cannot fail.
    let _infallible = writeln!(chains, ":KUBE-SVC-{label} - [0:0]");
    let _infallible = writeln!(
        services,
        "-A KUBE-SERVICES {to_service} -j KUBE-SVC-{label}"
    );
    let _infallible = writeln!(
        rest,
        "-A KUBE-SVC-{label} ! -s {CLUSTER_CIDR} {to_service} -j KUBE-MARK-MASQ"
    );
    if let Some(node_port) = service.node_port {
        let _infallible = writeln!(chains, ":KUBE-EXT-{label} - [0:0]");
        let _infallible = writeln!(
            node_ports,
            "-A KUBE-NODEPORTS -p {protocol} -m comment --comment \"{name}\" -m {protocol} --dport {node_port} \
             -j KUBE-EXT-{label}"
        );
        let _infallible = writeln!(
            rest,
            "-A KUBE-EXT-{label} -m comment --comment \"masquerade traffic for {name} external destinations\" \
             -j KUBE-MARK-MASQ\n-A KUBE-EXT-{label} -j KUBE-SVC-{label}"
        );
    }
    for (index, backend) in backends.iter().enumerate() {
        let endpoint = format!("KUBE-SEP-{label}{index:02}");
        let left = u32::try_from(backends.len() - index).unwrap_or(1);
        let odds = if left == 1 {
            String::new()
        } else {
            let share = 1.0 / f64::from(left);
            format!("-m statistic --mode random --probability {share:.10} ")
        };
        let _infallible = writeln!(chains, ":{endpoint} - [0:0]");
        let _infallible = writeln!(rest, "-A KUBE-SVC-{label} {odds}-j {endpoint}");
        let _infallible = writeln!(
            rest,
            "-A {endpoint} -s {}/32 -j KUBE-MARK-MASQ\n\
             -A {endpoint} -p {protocol} -m {protocol} -j DNAT --to-destination {backend}",
            backend.ip()
        );
    }
}

/// Input of `nft -f`. NodePorts are served on `node`.
pub(crate) fn nftables(fleet: &Fleet, node: Ipv4Addr) -> String {
    let mut services = Vec::new();
    let mut node_ports = Vec::new();
    let mut addresses = Vec::new();
    let mut chains = String::new();
    for port in ports(fleet) {
        let Port {
            service,
            protocol,
            label,
        } = &port;
        services.push(format!(
            "{} . {protocol} . {SERVICE_PORT} : goto service-{label}",
            service.address
        ));
        if *protocol == "tcp" {
            addresses.push(service.address.to_string());
        }
        if let Some(node_port) = service.node_port {
            node_ports.push(format!("{protocol} . {node_port} : goto external-{label}"));
            let _infallible = writeln!(
                chains,
                "chain external-{label} {{\njump mark-for-masquerade\ngoto service-{label}\n}}"
            );
        }
        nftables_service(&port, &mut chains);
    }
    format!(
        "table ip kube-proxy {{\n\
         set cluster-ips {{ type ipv4_addr\nelements = {{ {} }}\n}}\n\
         set nodeport-ips {{ type ipv4_addr\nelements = {{ {node} }}\n}}\n\
         map no-endpoint-services {{ type ipv4_addr . inet_proto . inet_service : verdict\n}}\n\
         map no-endpoint-nodeports {{ type inet_proto . inet_service : verdict\n}}\n\
         map firewall-ips {{ type ipv4_addr . inet_proto . inet_service : verdict\n}}\n\
         {NFT_BASE}{chains}\
         map service-ips {{ type ipv4_addr . inet_proto . inet_service : verdict\nelements = {{ {} }}\n}}\n\
         map service-nodeports {{ type inet_proto . inet_service : verdict\nelements = {{ {} }}\n}}\n\
         {NFT_HOOKS}}}\n",
        addresses.join(", "),
        services.join(",\n"),
        node_ports.join(",\n"),
    )
}

const NFT_BASE: &str = "\
    chain mark-for-masquerade {\nmeta mark set meta mark or 0x4000\n}\n\
    chain masquerading {\nmeta mark and 0x4000 == 0 return\nmeta mark set meta mark xor 0x4000\nmasquerade fully-random\n}\n\
    chain cluster-ips-check {\nip daddr @cluster-ips reject\n}\n\
    chain firewall-check {\nip daddr . meta l4proto . th dport vmap @firewall-ips\n}\n\
    chain service-endpoints-check {\nip daddr . meta l4proto . th dport vmap @no-endpoint-services\n}\n\
    chain nodeport-endpoints-check {\nip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports\n}\n";

const NFT_HOOKS: &str = "\
    chain services {\nip daddr . meta l4proto . th dport vmap @service-ips\n\
    ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports\n}\n\
    chain filter-prerouting {\ntype filter hook prerouting priority -110;\nct state new jump firewall-check\n}\n\
    chain filter-input {\ntype filter hook input priority -110;\nct state new jump nodeport-endpoints-check\n\
    ct state new jump service-endpoints-check\n}\n\
    chain filter-forward {\ntype filter hook forward priority -110;\nct state new jump service-endpoints-check\n\
    ct state new jump cluster-ips-check\n}\n\
    chain filter-output {\ntype filter hook output priority -110;\nct state new jump service-endpoints-check\n\
    ct state new jump firewall-check\n}\n\
    chain filter-output-post-dnat {\ntype filter hook output priority -90;\nct state new jump cluster-ips-check\n}\n\
    chain nat-output {\ntype nat hook output priority -100;\njump services\n}\n\
    chain nat-prerouting {\ntype nat hook prerouting priority dstnat;\njump services\n}\n\
    chain nat-postrouting {\ntype nat hook postrouting priority srcnat;\njump masquerading\n}\n";

fn nftables_service(port: &Port<'_>, chains: &mut String) {
    let Port {
        service,
        protocol,
        label,
    } = port;
    for (index, backend) in service.backends.iter().enumerate() {
        let _infallible = writeln!(
            chains,
            "chain {} {{\nip saddr {} jump mark-for-masquerade\nmeta l4proto {protocol} dnat to {backend}\n}}",
            port.endpoint_chain(index, backend),
            backend.ip()
        );
    }
    let choices: Vec<String> = service
        .backends
        .iter()
        .enumerate()
        .map(|(index, backend)| format!("{index} : goto {}", port.endpoint_chain(index, backend)))
        .collect();
    let _infallible = writeln!(
        chains,
        "chain service-{label} {{\n\
         ip daddr {} {protocol} dport {SERVICE_PORT} ip saddr != {CLUSTER_CIDR} jump mark-for-masquerade\n\
         numgen random mod {} vmap {{ {} }}\n}}",
        service.address,
        choices.len(),
        choices.join(", ")
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet() -> Fleet {
        Fleet::new(20, 10, [10, 244, 1, 2].into(), [10, 244, 2, 2].into())
    }

    #[test]
    fn iptables_has_a_rule_per_service_port_and_a_translation_per_endpoint() {
        let text = iptables(&fleet());
        let count = |part: &str| text.lines().filter(|line| line.contains(part)).count();
        // Eight of the twenty serve UDP as well.
        assert_eq!(count("-A KUBE-SERVICES -d "), 28);
        assert_eq!(count("-j DNAT"), 280);
        assert_eq!(count("-m statistic"), 28 * 9);
        assert_eq!(count("-A KUBE-NODEPORTS"), 16);
        assert!(text.contains("--probability 0.1000000000 "));
    }

    #[test]
    fn nftables_has_an_element_per_service_port_and_a_chain_per_endpoint() {
        let text = nftables(&fleet(), [192, 0, 2, 11].into());
        assert_eq!(text.matches(" : goto service-").count(), 28);
        assert_eq!(text.matches("dnat to").count(), 280);
        assert_eq!(text.matches("numgen random mod 10").count(), 28);
        assert_eq!(text.matches(" : goto external-").count(), 16);
    }
}
