use super::*;
use control_api::v1::{EnvFrom, ResourceRef, Resources, ServicePort};

fn service(namespace: &str, name: &str, ip: &str) -> (Name, Service) {
    let port = |name: &str, port, protocol: Protocol| ServicePort {
        name: name.into(),
        port,
        protocol: protocol.into(),
        node_port: 0,
    };
    let service = Service {
        namespace: namespace.into(),
        name: name.into(),
        cluster_ips: vec![ip.into()],
        ports: vec![
            port("web", 80, Protocol::Tcp),
            port("dns-udp", 53, Protocol::Udp),
        ],
        ..Service::default()
    };
    (Name::new(namespace, name), service)
}

fn desired() -> DesiredState {
    let mut desired = DesiredState::default();
    desired.services.extend([
        service("default", "kubernetes", "10.96.0.1"),
        service("ns", "my-db", "10.96.0.7"),
        service("other", "far", "10.96.0.8"),
    ]);
    let data = BTreeMap::from([
        ("KEY".to_owned(), b"value".to_vec()),
        ("bad=name".into(), b"x".to_vec()),
    ]);
    let object = KeyedData {
        namespace: "ns".into(),
        name: "conf".into(),
        data,
    };
    desired
        .config_maps
        .insert(Name::new("ns", "conf"), object.clone());
    desired.secrets.insert(Name::new("ns", "conf"), object);
    desired
}

fn spec(links: bool) -> PodSpec {
    PodSpec {
        namespace: "ns".into(),
        name: "pod".into(),
        enable_service_links: links,
        labels: BTreeMap::from([("app".to_owned(), "shop".to_owned())]),
        ..PodSpec::default()
    }
}

fn var(name: &str, source: Source) -> EnvVar {
    EnvVar {
        name: name.into(),
        source: Some(source),
    }
}

fn computed(
    spec: &PodSpec,
    container: &Container,
) -> Result<BTreeMap<String, String>, ConfigError> {
    let (desired, node) = (
        desired(),
        NodeFacts {
            name: "n1".into(),
            cpu_millis: 2000,
            ..NodeFacts::default()
        },
    );
    let ips = ["10.244.0.5".to_owned()];
    let context = Context {
        spec,
        desired: &desired,
        node: &node,
        pod_ips: &ips,
    };
    environment(context, container).map(|list| list.into_iter().collect())
}

#[test]
fn expansion_follows_the_rules() {
    let lookup = |name: &str| (name == "A").then(|| "1".to_owned());
    for (input, output) in [
        ("$(A)", "1"),
        ("x$(A)y$(A)", "x1y1"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$(B)", "$(B)"),
        ("$A $(A", "$A $(A"),
        ("$", "$"),
        ("", ""),
    ] {
        assert_eq!(expand(input, lookup), output, "{input}");
    }
}

#[test]
fn variables_come_from_everywhere_and_refer_to_earlier_ones() {
    let limits = Resources {
        limit_cpu_millis: 1500,
        ..Resources::default()
    };
    let container = Container {
        name: "c".into(),
        resources: Some(limits),
        env_from: vec![EnvFrom {
            prefix: "P_".into(),
            config_map: "conf".into(),
            ..EnvFrom::default()
        }],
        env: vec![
            var("NAME", Source::FieldPath("metadata.name".into())),
            var("IP", Source::FieldPath("status.podIP".into())),
            var("APP", Source::FieldPath("metadata.labels['app']".into())),
            var("NODE", Source::FieldPath("spec.nodeName".into())),
            var(
                "CPU",
                Source::Resource(ResourceRef {
                    container: "c".into(),
                    resource: "limits.cpu".into(),
                    divisor: String::new(),
                }),
            ),
            var(
                "ALL",
                Source::Value("$(NAME)/$(P_KEY)/$(LATER)/$(KUBERNETES_SERVICE_HOST)".into()),
            ),
            var("LATER", Source::Value("no".into())),
        ],
        ..Container::default()
    };
    let env = computed(&spec(false), &container).unwrap();
    assert_eq!(env["P_KEY"], "value");
    assert!(!env.keys().any(|k| k.contains('=')));
    assert_eq!(env["APP"], "shop");
    assert_eq!(env["IP"], "10.244.0.5");
    assert_eq!(env["NODE"], "n1");
    assert_eq!(env["CPU"], "2");
    assert_eq!(env["ALL"], "pod/value/$(LATER)/10.96.0.1");
}

#[test]
fn service_variables_depend_on_links() {
    let none = computed(&spec(false), &Container::default()).unwrap();
    assert_eq!(none["KUBERNETES_SERVICE_HOST"], "10.96.0.1");
    assert_eq!(none["KUBERNETES_PORT"], "tcp://10.96.0.1:80");
    assert!(!none.contains_key("MY_DB_SERVICE_HOST"));
    let linked = computed(&spec(true), &Container::default()).unwrap();
    assert_eq!(linked["MY_DB_SERVICE_PORT_DNS_UDP"], "53");
    assert_eq!(linked["MY_DB_PORT_53_UDP"], "udp://10.96.0.7:53");
    assert_eq!(linked["MY_DB_PORT_80_TCP_ADDR"], "10.96.0.7");
    assert!(!linked.contains_key("FAR_SERVICE_HOST"));
}

#[test]
fn missing_references_are_errors_unless_optional() {
    let key = |name: &str, key: &str, optional| KeyRef {
        name: name.into(),
        key: key.into(),
        optional,
    };
    let with = |source| Container {
        env: vec![var("X", source)],
        ..Container::default()
    };
    let error = |source| {
        computed(&spec(false), &with(source))
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        error(Source::ConfigMapKey(key("gone", "a", false))),
        "configmap \"gone\" not found"
    );
    assert_eq!(
        error(Source::SecretKey(key("gone", "a", false))),
        "secret \"gone\" not found"
    );
    assert_eq!(
        error(Source::ConfigMapKey(key("conf", "nokey", false))),
        "couldn't find key nokey in ConfigMap ns/conf"
    );
    for source in [key("gone", "a", true), key("conf", "nokey", true)] {
        let env = computed(&spec(false), &with(Source::SecretKey(source))).unwrap();
        assert!(!env.contains_key("X"));
    }
    assert!(error(Source::FieldPath("spec.nope".into())).contains("spec.nope"));
}
