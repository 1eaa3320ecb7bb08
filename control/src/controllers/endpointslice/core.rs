//! EndpointSlices: from a Service and its pods, or from Endpoints that somebody wrote by hand, to the slices that should
//! exist, changing as few of them as possible. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::controllers::pods;
use crate::controllers::runtime::informer::SERVICE_NAME_LABEL;
use crate::controllers::runtime::object::{Object, controller_reference, set};

pub(super) const MANAGED_BY_LABEL: &str = "endpointslice.kubernetes.io/managed-by";
pub(super) const MANAGED_BY: &str = "endpointslice-controller.k8s.io";
pub(super) const MIRRORED_BY: &str = "endpointslicemirroring-controller.k8s.io";
const HEADLESS_LABEL: &str = "service.kubernetes.io/headless";
/// Endpoints in one slice, at most.
pub(super) const SLICE_LIMIT: usize = 100;
/// Addresses of one subset that are mirrored, at most; more are left out.
const MIRROR_LIMIT: usize = 1000;
pub(super) const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// What to write.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) create: Vec<Value>,
    pub(super) update: Vec<Value>,
    pub(super) delete: Vec<Arc<Value>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Family {
    V4,
    V6,
}

impl Family {
    fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    fn of(address: IpAddr) -> Self {
        if address.is_ipv4() {
            Self::V4
        } else {
            Self::V6
        }
    }
}

/// What slices are made for.
#[derive(Clone, Copy)]
struct Source<'a> {
    object: &'a Value,
    kind: &'static str,
    managed_by: &'static str,
}

/// The ports of a slice in canonical text, to group endpoints by.
type PortsKey = String;

/// Endpoints by their identity, of one family and one set of ports.
#[derive(Debug, Default)]
struct Group {
    ports: Value,
    endpoints: BTreeMap<String, Value>,
}

/// `zones` maps node names to zones. `existing` are the slices of this Service that this controller manages.
pub(super) fn plan(
    service: &Value,
    pods: &[Arc<Value>],
    zones: &HashMap<String, String>,
    existing: &[Arc<Value>],
) -> Plan {
    let source = Source {
        object: service,
        kind: "Service",
        managed_by: MANAGED_BY,
    };
    plan_groups(source, wanted(service, pods, zones), existing)
}

/// Mirrors an Endpoints object (`kube-controller-manager`'s endpointslicemirroring).
pub(super) fn mirror(endpoints: &Value, existing: &[Arc<Value>]) -> Plan {
    let source = Source {
        object: endpoints,
        kind: "Endpoints",
        managed_by: MIRRORED_BY,
    };
    plan_groups(source, mirrored(endpoints), existing)
}

type Groups = BTreeMap<(Family, PortsKey), Group>;

fn plan_groups(source: Source<'_>, mut groups: Groups, existing: &[Arc<Value>]) -> Plan {
    let mut plan = Plan::default();
    let mut present: BTreeMap<(Family, PortsKey), Vec<&Arc<Value>>> = BTreeMap::new();
    for slice in existing {
        let family = match slice.text(&["addressType"]) {
            "IPv4" => Family::V4,
            "IPv6" => Family::V6,
            _ => {
                plan.delete.push(slice.clone());
                continue;
            }
        };
        let ports = slice.at(&["ports"]).cloned().unwrap_or(Value::Null);
        present
            .entry((family, ports_key(&ports)))
            .or_default()
            .push(slice);
    }
    for (key, slices) in &present {
        match groups.remove(key) {
            Some(group) => plan_group(source, key.0, group, slices, &mut plan),
            None => plan.delete.extend(slices.iter().map(|s| (*s).clone())),
        }
    }
    for ((family, _), group) in groups {
        plan_group(source, family, group, &[], &mut plan);
    }
    plan
}

fn families(service: &Value) -> Vec<Family> {
    let named: Vec<Family> = service
        .items(&["spec", "ipFamilies"])
        .iter()
        .filter_map(|f| match f.as_str()? {
            "IPv4" => Some(Family::V4),
            "IPv6" => Some(Family::V6),
            _ => None,
        })
        .collect();
    if named.is_empty() {
        vec![Family::V4]
    } else {
        named
    }
}

/// Every endpoint that should be published. A family without any keeps one empty slice, so that watchers learn that
/// the Service has been looked at.
fn wanted(service: &Value, pods: &[Arc<Value>], zones: &HashMap<String, String>) -> Groups {
    let mut groups = Groups::new();
    for family in families(service) {
        let mut any = false;
        for pod in pods.iter().filter(|p| !pods::is_finished(p)) {
            let Some(address) = address(pod, family) else {
                continue;
            };
            let ports = ports(service, pod);
            let group = groups.entry((family, ports_key(&ports))).or_default();
            group.ports = ports;
            let endpoint = endpoint(service, pod, &address, zones);
            group.endpoints.insert(pod.uid().to_owned(), endpoint);
            any = true;
        }
        if !any {
            let group = groups.entry((family, ports_key(&Value::Null))).or_default();
            group.ports = json!([]);
        }
    }
    groups
}

/// The subsets of an Endpoints object by family and ports. An address that is listed twice is ready if it is once.
fn mirrored(endpoints: &Value) -> Groups {
    let mut groups = Groups::new();
    for subset in endpoints.items(&["subsets"]) {
        let ports = Value::Array(subset.items(&["ports"]).iter().map(mirrored_port).collect());
        let ready = subset.items(&["addresses"]).iter().map(|a| (a, true));
        let unready = subset.items(&["notReadyAddresses"]).iter();
        let all = ready.chain(unready.map(|a| (a, false)));
        for (address, ready) in all.take(MIRROR_LIMIT) {
            let Ok(ip) = address.text(&["ip"]).parse::<IpAddr>() else {
                continue;
            };
            let key = (Family::of(ip), ports_key(&ports));
            let group = groups.entry(key).or_default();
            group.ports = ports.clone();
            let endpoint = mirrored_endpoint(address, ip, ready);
            group
                .endpoints
                .entry(identity(&endpoint))
                .or_insert(endpoint);
        }
    }
    groups
}

fn mirrored_port(port: &Value) -> Value {
    let protocol = match port.text(&["protocol"]) {
        "" => "TCP",
        protocol => protocol,
    };
    let mut out =
        json!({"name": port.text(&["name"]), "port": port.number(&["port"]), "protocol": protocol});
    let app = port.text(&["appProtocol"]);
    if !app.is_empty() {
        set(&mut out, &["appProtocol"], app.into());
    }
    out
}

fn mirrored_endpoint(address: &Value, ip: IpAddr, ready: bool) -> Value {
    let mut out = json!({"addresses": [ip.to_string()], "conditions": {"ready": ready}});
    for field in ["hostname", "nodeName"] {
        let text = address.text(&[field]);
        if !text.is_empty() {
            set(&mut out, &[field], text.into());
        }
    }
    if let Some(target) = address.at(&["targetRef"]) {
        set(&mut out, &["targetRef"], target.clone());
    }
    out
}

/// What makes an endpoint the same one after a change: its pod, or its address.
fn identity(endpoint: &Value) -> String {
    let uid = endpoint.text(&["targetRef", "uid"]);
    if !uid.is_empty() {
        return uid.to_owned();
    }
    let first = endpoint.items(&["addresses"]).first();
    first.and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn address(pod: &Value, family: Family) -> Option<String> {
    let listed = pod
        .items(&["status", "podIPs"])
        .iter()
        .map(|ip| ip.text(&["ip"]));
    listed
        .chain([pod.text(&["status", "podIP"])])
        .find(|ip| ip.parse::<IpAddr>().is_ok_and(|a| Family::of(a) == family))
        .map(str::to_owned)
}

fn endpoint(service: &Value, pod: &Value, address: &str, zones: &HashMap<String, String>) -> Value {
    let serving = pods::is_ready(pod);
    let terminating = pod.is_deleting();
    let early = service.flag(&["spec", "publishNotReadyAddresses"]);
    let mut out = json!({
        "addresses": [address],
        "conditions": {
            "ready": early || (serving && !terminating),
            "serving": serving,
            "terminating": terminating,
        },
    });
    let hostname = pod.text(&["spec", "hostname"]);
    if !hostname.is_empty() && pod.text(&["spec", "subdomain"]) == service.name() {
        set(&mut out, &["hostname"], hostname.into());
    }
    let node = pod.text(&["spec", "nodeName"]);
    if !node.is_empty() {
        set(&mut out, &["nodeName"], node.into());
    }
    let target = json!({
        "kind": "Pod", "namespace": pod.namespace(), "name": pod.name(), "uid": pod.uid(),
    });
    set(&mut out, &["targetRef"], target);
    if let Some(zone) = zones.get(node) {
        set(&mut out, &["zone"], zone.clone().into());
    }
    if let Some(hints) = hints(service, &out) {
        set(&mut out, &["hints"], hints);
    }
    out
}

/// Who should prefer this endpoint, by `spec.trafficDistribution` (KEP-4444, KEP-3015). Only ready endpoints are hinted
/// at; one without a zone has no hint, which makes proxies ignore those of the others.
fn hints(service: &Value, endpoint: &Value) -> Option<Value> {
    let same_node = match service.text(&["spec", "trafficDistribution"]) {
        "PreferClose" | "PreferSameZone" => false,
        "PreferSameNode" => true,
        _ => return None,
    };
    if !endpoint.flag(&["conditions", "ready"]) {
        return None;
    }
    let mut hints = Map::new();
    let named = |field: &str| Some(endpoint.text(&[field])).filter(|text| !text.is_empty());
    if let Some(zone) = named("zone") {
        hints.insert("forZones".into(), json!([{"name": zone}]));
    }
    if let Some(node) = named("nodeName").filter(|_| same_node) {
        hints.insert("forNodes".into(), json!([{"name": node}]));
    }
    (!hints.is_empty()).then_some(Value::Object(hints))
}

/// The Service's ports as this pod has them. A named target port that the pod lacks is left out.
fn ports(service: &Value, pod: &Value) -> Value {
    let resolved = service.items(&["spec", "ports"]).iter().filter_map(|port| {
        let protocol = match port.text(&["protocol"]) {
            "" => "TCP",
            protocol => protocol,
        };
        let number = match port.at(&["targetPort"]) {
            Some(Value::String(name)) => container_port(pod, name, protocol)?,
            Some(Value::Number(n)) if n.as_i64() != Some(0) => n.as_i64()?,
            _ => port.number(&["port"])?,
        };
        let mut out = json!({"name": port.text(&["name"]), "port": number, "protocol": protocol});
        let app = port.text(&["appProtocol"]);
        if !app.is_empty() {
            set(&mut out, &["appProtocol"], app.into());
        }
        Some(out)
    });
    Value::Array(resolved.collect())
}

fn container_port(pod: &Value, name: &str, protocol: &str) -> Option<i64> {
    // A name can also stand for a number in text, as older manifests write it.
    if let Ok(number) = name.parse() {
        return Some(number);
    }
    let restartable = |c: &&Value| c.text(&["restartPolicy"]) == "Always";
    let sidecars = pod
        .items(&["spec", "initContainers"])
        .iter()
        .filter(restartable);
    pod.items(&["spec", "containers"])
        .iter()
        .chain(sidecars)
        .flat_map(|c| c.items(&["ports"]))
        .find(|p| {
            let has = match p.text(&["protocol"]) {
                "" => "TCP",
                protocol => protocol,
            };
            p.text(&["name"]) == name && has == protocol
        })?
        .number(&["containerPort"])
}

/// Order and absent defaults do not make other ports.
fn ports_key(ports: &Value) -> PortsKey {
    let mut lines: Vec<String> = ports
        .as_array()
        .into_iter()
        .flatten()
        .map(|p| {
            format!(
                "{}\0{}\0{}\0{}",
                p.text(&["name"]),
                p.number(&["port"]).unwrap_or(0),
                p.text(&["protocol"]),
                p.text(&["appProtocol"])
            )
        })
        .collect();
    lines.sort();
    lines.join("\n")
}

/// Keeps endpoints where they are, fills gaps with new ones, and makes slices for the rest.
fn plan_group(
    source: Source<'_>,
    family: Family,
    mut group: Group,
    slices: &[&Arc<Value>],
    plan: &mut Plan,
) {
    let mut contents: Vec<(&Arc<Value>, Vec<Value>)> = Vec::new();
    for slice in slices {
        let kept = slice
            .items(&["endpoints"])
            .iter()
            .filter_map(|e| group.endpoints.remove(&identity(e)));
        let mut kept: Vec<Value> = kept.collect();
        while kept.len() > SLICE_LIMIT {
            if let Some(surplus) = kept.pop() {
                group.endpoints.insert(identity(&surplus), surplus);
            }
        }
        contents.push((slice, kept));
    }
    let mut rest: Vec<Value> = group.endpoints.into_values().collect();
    rest.sort_by(|a, b| {
        a.text(&["targetRef", "name"])
            .cmp(b.text(&["targetRef", "name"]))
    });
    let mut rest = rest.into_iter().peekable();
    // The fullest first, so that small ones may become empty and go.
    contents.sort_by_key(|(slice, kept)| (std::cmp::Reverse(kept.len()), slice.name().to_owned()));
    for (_, kept) in &mut contents {
        while kept.len() < SLICE_LIMIT && rest.peek().is_some() {
            kept.extend(rest.next());
        }
    }
    let mut stay = 0;
    let empty_group = contents.iter().all(|(_, kept)| kept.is_empty()) && rest.peek().is_none();
    for (slice, kept) in contents {
        if kept.is_empty() && !(empty_group && stay == 0) {
            plan.delete.push(slice.clone());
            continue;
        }
        stay += 1;
        let updated = dress(slice.as_ref().clone(), source, kept, &group.ports);
        if &updated != slice.as_ref() {
            plan.update.push(updated);
        }
    }
    let mut chunk: Vec<Value> = Vec::new();
    loop {
        let next = rest.next();
        let last = next.is_none();
        chunk.extend(next);
        let due = chunk.len() == SLICE_LIMIT || last;
        if due && (!chunk.is_empty() || (empty_group && stay == 0)) {
            let base = json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
                "metadata": {
                    "generateName": format!("{}-", source.object.name()),
                    "namespace": source.object.namespace(),
                },
                "addressType": family.name(),
            });
            let chunk = std::mem::take(&mut chunk);
            plan.create.push(dress(base, source, chunk, &group.ports));
        }
        if last {
            return;
        }
    }
}

/// Gives a slice its content, labels and owner; what others added to it stays.
fn dress(mut slice: Value, source: Source<'_>, endpoints: Vec<Value>, ports: &Value) -> Value {
    let object = source.object;
    let reserved: BTreeSet<&str> =
        BTreeSet::from([SERVICE_NAME_LABEL, MANAGED_BY_LABEL, HEADLESS_LABEL]);
    let mut labels = Map::new();
    for (key, value) in object.labels().into_iter().flatten() {
        if !reserved.contains(key.as_str()) {
            labels.insert(key.clone(), value.clone());
        }
    }
    labels.insert(SERVICE_NAME_LABEL.into(), object.name().into());
    labels.insert(MANAGED_BY_LABEL.into(), source.managed_by.into());
    if object.text(&["spec", "clusterIP"]) == "None" {
        labels.insert(HEADLESS_LABEL.into(), "".into());
    }
    set(&mut slice, &["metadata", "labels"], Value::Object(labels));
    let owner = controller_reference(object, "v1", source.kind);
    set(&mut slice, &["metadata", "ownerReferences"], json!([owner]));
    set(&mut slice, &["endpoints"], Value::Array(endpoints));
    if ports_key(slice.at(&["ports"]).unwrap_or(&Value::Null)) != ports_key(ports)
        || slice.at(&["ports"]).is_none()
    {
        set(&mut slice, &["ports"], ports.clone());
    }
    slice
}
