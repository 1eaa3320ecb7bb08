//! The documented outcomes of every policy on clusters with one and with two families.

use serde_json::{Value, json};

use super::*;

const DUAL: &[&str] = &[IPV4, IPV6];

/// What | families of the cluster | spec | policy, or the field that is refused | families
const CREATED: &str = "
nothing said | 46 | {} | SingleStack | 4
nothing said, IPv6 first | 64 | {} | SingleStack | 6
a family | 46 | {ipFamilies: [IPv6]} | SingleStack | 6
an address | 46 | {clusterIP: 'fd00:10:96::7'} | SingleStack | 6
preference | 46 | {ipFamilyPolicy: PreferDualStack} | PreferDualStack | 46
preference, one family | 4 | {ipFamilyPolicy: PreferDualStack} | PreferDualStack | 4
preference, order kept | 46 | {ipFamilyPolicy: PreferDualStack, ipFamilies: [IPv6]} | PreferDualStack | 64
requirement by address | 46 | {ipFamilyPolicy: RequireDualStack, clusterIP: 'fd00:10:96::7'} | RequireDualStack | 64
requirement by addresses | 46 | {ipFamilyPolicy: RequireDualStack, clusterIP: 'fd00:10:96::7', clusterIPs: ['fd00:10:96::7', 10.96.0.7]} | RequireDualStack | 64
requirement unmet | 4 | {ipFamilyPolicy: RequireDualStack} | spec.ipFamilyPolicy |
two families without a policy | 46 | {ipFamilies: [IPv4, IPv6]} | spec.ipFamilyPolicy |
two addresses without a policy | 46 | {clusterIP: 10.96.0.7, clusterIPs: [10.96.0.7, 'fd00:10:96::7']} | spec.ipFamilyPolicy |
two families, one stack | 46 | {ipFamilyPolicy: SingleStack, ipFamilies: [IPv4, IPv6]} | spec.ipFamilyPolicy |
absent family | 4 | {ipFamilies: [IPv6]} | spec.ipFamilies[0] |
absent family by address | 4 | {clusterIP: 'fd00:10:96::7'} | spec.clusterIPs[0] |
absent second family | 4 | {ipFamilyPolicy: PreferDualStack, ipFamilies: [IPv4, IPv6]} | spec.ipFamilies[1] |
a family twice | 46 | {ipFamilyPolicy: PreferDualStack, ipFamilies: [IPv4, IPv4]} | spec.ipFamilies[1] |
unknown family | 46 | {ipFamilies: [IPv5]} | spec.ipFamilies[0] |
unknown policy | 46 | {ipFamilyPolicy: Both} | spec.ipFamilyPolicy |
two addresses of one family | 46 | {ipFamilyPolicy: PreferDualStack, clusterIP: 10.96.0.7, clusterIPs: [10.96.0.7, 10.96.0.8]} | spec.clusterIPs |
three addresses | 46 | {ipFamilyPolicy: PreferDualStack, clusterIP: 10.96.0.7, clusterIPs: [10.96.0.7, 'fd00:10:96::7', 10.96.0.8]} | spec.clusterIPs |
address of the other family | 46 | {clusterIP: 10.96.0.7, ipFamilies: [IPv6]} | spec.clusterIPs[0] |
no address | 46 | {clusterIP: ten} | spec.clusterIPs[0] |
plural alone | 46 | {clusterIPs: [10.96.0.7]} | spec.clusterIPs |
pair differs | 46 | {clusterIP: 10.96.0.7, clusterIPs: [10.96.0.8]} | spec.clusterIPs |
None and more | 46 | {clusterIP: None, clusterIPs: [None, 10.96.0.7]} | spec.clusterIPs |
headless | 46 | {clusterIP: None, selector: {a: b}} | SingleStack | 4
headless, preference | 46 | {clusterIP: None, selector: {a: b}, ipFamilyPolicy: PreferDualStack} | PreferDualStack | 46
headless, requirement unmet | 4 | {clusterIP: None, selector: {a: b}, ipFamilyPolicy: RequireDualStack} | spec.ipFamilyPolicy |
headless, absent family | 4 | {clusterIP: None, selector: {a: b}, ipFamilies: [IPv6]} | spec.ipFamilies[0] |
headless, no selector | 46 | {clusterIP: None} | RequireDualStack | 46
headless, no selector, one family | 4 | {clusterIP: None} | RequireDualStack | 46
headless, no selector, single | 4 | {clusterIP: None, ipFamilyPolicy: SingleStack} | SingleStack | 4
headless, no selector, absent family | 4 | {clusterIP: None, ipFamilyPolicy: SingleStack, ipFamilies: [IPv6]} | SingleStack | 6
headless, no selector, a family | 46 | {clusterIP: None, ipFamilies: [IPv6]} | RequireDualStack | 64
";

const SINGLE_STACK: &str = "{clusterIP: 10.96.0.7, clusterIPs: [10.96.0.7], ipFamilyPolicy: SingleStack, ipFamilies: [IPv4]}";
const DUAL_STACK: &str = "{clusterIP: 10.96.0.7, clusterIPs: [10.96.0.7, 'fd00:10:96::7'], ipFamilyPolicy: RequireDualStack, ipFamilies: [IPv4, IPv6]}";
const PREFERS: &str = "{clusterIP: 10.96.0.7, clusterIPs: [10.96.0.7], ipFamilyPolicy: PreferDualStack, ipFamilies: [IPv4]}";
const HEADLESS: &str = "{clusterIP: None, clusterIPs: [None], ipFamilyPolicy: SingleStack, ipFamilies: [IPv4], selector: {a: b}}";
const NAMED: &str = "{type: ExternalName, externalName: a.example.com}";

/// What | before | families of the cluster | changed fields | policy, or the field that is refused | families
const CHANGED: &str = "
up by policy | SINGLE | 46 | {ipFamilyPolicy: RequireDualStack} | RequireDualStack | 46
up by preference | SINGLE | 46 | {ipFamilyPolicy: PreferDualStack} | PreferDualStack | 46
up by preference, one family | SINGLE | 4 | {ipFamilyPolicy: PreferDualStack} | PreferDualStack | 4
up by requirement, one family | SINGLE | 4 | {ipFamilyPolicy: RequireDualStack} | spec.ipFamilyPolicy |
up without a policy | SINGLE | 46 | {ipFamilies: [IPv4, IPv6]} | spec.ipFamilyPolicy |
up with an address | SINGLE | 46 | {ipFamilyPolicy: PreferDualStack, clusterIPs: [10.96.0.7, 'fd00:10:96::7']} | PreferDualStack | 46
up with another first family | SINGLE | 46 | {ipFamilyPolicy: PreferDualStack, ipFamilies: [IPv6, IPv4]} | spec.ipFamilies[0] |
down by policy | DUAL | 46 | {ipFamilyPolicy: SingleStack} | SingleStack | 4
down in full | DUAL | 46 | {ipFamilyPolicy: SingleStack, clusterIPs: [10.96.0.7], ipFamilies: [IPv4]} | SingleStack | 4
down by address alone | DUAL | 46 | {clusterIPs: [10.96.0.7]} | spec.ipFamilyPolicy |
down by family alone | DUAL | 46 | {ipFamilies: [IPv4]} | spec.ipFamilyPolicy |
weaker wish | DUAL | 46 | {ipFamilyPolicy: PreferDualStack} | PreferDualStack | 46
another second address | DUAL | 46 | {clusterIPs: [10.96.0.7, 'fd00:10:96::8']} | spec.clusterIPs[1] |
another first address | SINGLE | 46 | {clusterIP: 10.96.0.8, clusterIPs: [10.96.0.8]} | spec.clusterIPs[0] |
to headless | SINGLE | 46 | {clusterIP: None, clusterIPs: [None]} | spec.clusterIPs[0] |
to an address | HEADLESS | 46 | {clusterIP: 10.96.0.7, clusterIPs: [10.96.0.7]} | spec.clusterIPs[0] |
headless changes family | HEADLESS | 46 | {ipFamilies: [IPv6]} | SingleStack | 6
headless up | HEADLESS | 46 | {ipFamilyPolicy: RequireDualStack} | RequireDualStack | 46
a cluster that became dual | PREFERS | 46 | {} | PreferDualStack | 4
policy kept when left out | PREFERS | 4 | {ipFamilyPolicy: ''} | PreferDualStack | 4
from a name | NAMED | 46 | {type: ClusterIP} | SingleStack | 4
";

fn service(spec: &str) -> Value {
    json!({"metadata": {"name": "s"}, "spec": serde_yaml_ng::from_str::<Value>(spec).unwrap()})
}

fn families(digits: &str) -> Vec<&'static str> {
    let one = |digit| if digit == '4' { IPV4 } else { IPV6 };
    digits.chars().map(one).collect()
}

fn check(what: &str, mut new: Value, old: Option<&Value>, cluster: &str, expected: (&str, &str)) {
    let outcome = match assign(&mut new, old, &families(cluster)) {
        Ok(()) => (policy(&new).to_owned(), of(&new)),
        Err(Faults::Causes(causes)) => (causes[0].field.clone(), Vec::new()),
        Err(Faults::Other(e)) => panic!("{what}: {e}"),
    };
    let list: Vec<String> = families(expected.1)
        .into_iter()
        .map(str::to_owned)
        .collect();
    assert_eq!(outcome, (expected.0.to_owned(), list), "{what}");
}

#[test]
fn creation() {
    for line in CREATED.trim().lines() {
        let [what, cluster, spec, policy, families] =
            line.split('|').map(str::trim).collect::<Vec<_>>()[..]
        else {
            panic!("{line}");
        };
        check(what, service(spec), None, cluster, (policy, families));
    }
}

#[test]
fn updates() {
    for line in CHANGED.trim().lines() {
        let [what, before, cluster, change, policy, families] =
            line.split('|').map(str::trim).collect::<Vec<_>>()[..]
        else {
            panic!("{line}");
        };
        let old = service(match before {
            "SINGLE" => SINGLE_STACK,
            "DUAL" => DUAL_STACK,
            "PREFERS" => PREFERS,
            "HEADLESS" => HEADLESS,
            _ => NAMED,
        });
        let mut new = old.clone();
        for (key, value) in service(change)["spec"].as_object().unwrap() {
            new["spec"][key] = value.clone();
        }
        check(what, new, Some(&old), cluster, (policy, families));
    }
}

#[test]
fn the_second_address_goes_with_the_policy() {
    let old = service(DUAL_STACK);
    let mut new = old.clone();
    new["spec"]["ipFamilyPolicy"] = json!(SINGLE);
    assign(&mut new, Some(&old), DUAL).unwrap();
    assert_eq!(cluster_ips(&new), ["10.96.0.7"]);
}
