//! Generates the two services of the kubelet's device plugin API from their methods' names: without
//! `protoc`. Their messages are in `src/api.rs`.

use tonic_build::manual::{Builder, Method, Service};

fn method(route: &str, name: &str, input: &str, output: &str) -> Method {
    Method::builder()
        .name(name)
        .route_name(route)
        .input_type(format!("crate::api::{input}"))
        .output_type(format!("crate::api::{output}"))
        .codec_path("crate::codec::Messages")
        .build()
}

fn main() {
    let register = method("Register", "register", "RegisterRequest", "Empty");
    let registration =
        Service::builder().name("Registration").package("v1beta1").method(register).build();
    let list_and_watch = Method::builder()
        .name("list_and_watch")
        .route_name("ListAndWatch")
        .input_type("crate::api::Empty")
        .output_type("crate::api::ListAndWatchResponse")
        .codec_path("crate::codec::Messages")
        .server_streaming()
        .build();
    let plugin = Service::builder()
        .name("DevicePlugin")
        .package("v1beta1")
        .method(method(
            "GetDevicePluginOptions",
            "get_device_plugin_options",
            "Empty",
            "DevicePluginOptions",
        ))
        .method(list_and_watch)
        .method(method(
            "GetPreferredAllocation",
            "get_preferred_allocation",
            "PreferredAllocationRequest",
            "PreferredAllocationResponse",
        ))
        .method(method("Allocate", "allocate", "AllocateRequest", "AllocateResponse"))
        .method(method(
            "PreStartContainer",
            "pre_start_container",
            "PreStartContainerRequest",
            "PreStartContainerResponse",
        ))
        .build();
    Builder::new().compile(&[registration, plugin]);
    println!("cargo::rerun-if-changed=build.rs");
}
